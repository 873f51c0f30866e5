"""The line of admitted prompts: takes what waits into sweeps over the layers, and hands on what is combined."""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

import torch

from services.worker.engine.admission import ResolvedPrompt
from services.worker.engine.combine import CombinePass, CombineSweep, Prompt
from services.worker.engine.context import EngineContext
from services.worker.engine.requests import EngineError, FailedEvent, GenerateRequest

__all__ = ["AdmittedPrompt", "CombineQueue", "count_joined"]


def count_joined(live_tokens: Sequence[int], limit: int) -> int:
    """How many prompts at the head of a line share a sweep: as many as have `limit` live tokens together, at least one."""
    return max(1, bisect_right(list(accumulate(live_tokens)), limit))


@dataclass(slots=True)
class AdmittedPrompt:
    """A request with everything that it needs to combine. since: when it was submitted.

    is_cancelled: nobody wants it any more, and it waits for its sweep to end; runs_alone: a sweep failed that it shared.
    """

    request: GenerateRequest
    since: float
    resolved: ResolvedPrompt
    combine: CombinePass
    admitted_at: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    runs_alone: bool = False


@dataclass(frozen=True, slots=True)
class _Sweep:
    """Prompts on their way. tokens: what one layer costs, in token layers."""

    prompts: list[AdmittedPrompt]
    steps: Generator[None, None, torch.Tensor]
    tokens: int


class CombineQueue:
    """Combines in order of arrival. What arrives while a sweep runs waits for the next. Lives on the engine's thread.

    `start` gets the prompts that a sweep has combined, and their last logits `[B, vocabulary]`.
    """

    def __init__(
        self,
        context: EngineContext,
        sweep_tokens: int,
        start: Callable[[Sequence[AdmittedPrompt], torch.Tensor], None],
    ) -> None:
        self._context = context
        self._sweep_tokens = sweep_tokens
        self._start = start
        self._waiting: deque[AdmittedPrompt] = deque()
        self._sweep: _Sweep | None = None

    @property
    def has_work(self) -> bool:
        """Something is left to combine."""
        return bool(self._waiting) or self._sweep is not None

    @property
    def prompts(self) -> list[Prompt]:
        """Everything that holds pages and a slot, cancelled or not."""
        swept = [] if self._sweep is None else self._sweep.prompts
        return [one.combine.prompt for one in (*swept, *self._waiting)]

    def add(self, prompt: AdmittedPrompt) -> None:
        """Put a prompt in the line."""
        self._waiting.append(prompt)

    def cancel(self, request_id: str) -> None:
        """Forget a request: free it at once, unless it shares a sweep, which writes into its pages until it ends."""
        dropped = [one for one in self._waiting if one.request.request_id == request_id]
        self._waiting = deque(one for one in self._waiting if one.request.request_id != request_id)
        sweep = self._sweep
        if sweep is not None:
            for one in sweep.prompts:
                one.is_cancelled |= one.request.request_id == request_id
            if all(one.is_cancelled for one in sweep.prompts):
                self._sweep = None
                dropped += sweep.prompts
        self._release(dropped)

    def advance(self) -> int:
        """One layer of the running sweep, or the start of the next; returns token layers spent."""
        sweep = self._sweep
        if sweep is None:
            self._sweep = self._begin()
            return 0
        try:
            next(sweep.steps)
        except StopIteration as finished:
            self._sweep = None
            self._finish(sweep, finished.value)
        except Exception as error:
            self._sweep = None
            self._fail(sweep, error)
        return sweep.tokens

    def _begin(self) -> _Sweep:
        prompts = self._take()
        steps = CombineSweep(self._context, [one.combine for one in prompts]).run()
        return _Sweep(prompts, steps, sum(one.resolved.plan.num_live for one in prompts))

    def _take(self) -> list[AdmittedPrompt]:
        joinable = list(takewhile(lambda one: not one.runs_alone, self._waiting))
        count = count_joined([one.resolved.plan.num_live for one in joinable], self._sweep_tokens)
        return [self._waiting.popleft() for _ in range(count)]

    def _finish(self, sweep: _Sweep, logits: torch.Tensor) -> None:
        wanted = self._wanted(sweep)
        if wanted:
            rows = [row for row, one in enumerate(sweep.prompts) if not one.is_cancelled]
            self._start(wanted, logits[rows])

    def _fail(self, sweep: _Sweep, error: Exception) -> None:
        """Prompts that shared the sweep run again, each alone, so that none fails for its neighbours."""
        wanted = self._wanted(sweep)
        if len(sweep.prompts) > 1:
            for one in wanted:
                one.runs_alone = True
                one.combine.drop_snapshots()
            self._waiting.extendleft(reversed(wanted))
            return
        self._release(wanted)
        for one in wanted:
            one.request.sink(FailedEvent(EngineError(f"combine failed: {error}")))

    def _wanted(self, sweep: _Sweep) -> list[AdmittedPrompt]:
        """The prompts of an ended sweep that nobody has cancelled; the others are freed."""
        self._release([one for one in sweep.prompts if one.is_cancelled])
        return [one for one in sweep.prompts if not one.is_cancelled]

    def _release(self, prompts: Sequence[AdmittedPrompt]) -> None:
        for one in prompts:
            one.combine.release()
