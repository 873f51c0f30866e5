"""The line of admitted prompts: gives what waits to the sweeps over the layers, and hands on what is combined."""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

import torch

from services.worker.engine.admission import ResolvedPrompt
from services.worker.engine.combine import CombinePass, CombineRows, Prompt
from services.worker.engine.context import EngineContext
from services.worker.engine.requests import EngineError, FailedEvent, GenerateRequest
from services.worker.engine.sweep import Rows

__all__ = ["AdmittedPrompt", "CombineQueue", "count_joined"]


def count_joined(live_tokens: Sequence[int], limit: int) -> int:
    """How many prompts at the head of a line share a sweep: as many as have `limit` live tokens together, at least one."""
    return max(1, bisect_right(list(accumulate(live_tokens)), limit))


@dataclass(slots=True)
class AdmittedPrompt:
    """A request with everything that it needs to combine. since: when it was submitted.

    is_cancelled: nobody wants it any more, and its rows have still to end; runs_alone: a sweep failed that it shared.
    """

    request: GenerateRequest
    since: float
    resolved: ResolvedPrompt
    combine: CombinePass
    admitted_at: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    runs_alone: bool = False


class CombineQueue:
    """Combines in order of arrival. What arrives while a sweep runs waits for the next. Lives on the engine's thread.

    See `Line`. `start` gets the prompts that a sweep has combined, and their last logits `[B, vocabulary]`.
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
        self._swept: list[AdmittedPrompt] = []
        self._rows = CombineRows(context, ())

    @property
    def is_ready(self) -> bool:
        """See `Line`."""
        return bool(self._waiting) and not self._swept

    @property
    def has_work(self) -> bool:
        """See `Line`."""
        return bool(self._waiting or self._swept)

    @property
    def prompts(self) -> list[Prompt]:
        """Everything that holds pages and a slot, cancelled or not."""
        return [one.combine.prompt for one in (*self._swept, *self._waiting)]

    @property
    def room(self) -> int:
        """Tokens that others may bring to the running sweep."""
        runs_alone = any(one.runs_alone for one in self._swept)
        return 0 if runs_alone else max(0, self._sweep_tokens - self._rows.num_tokens)

    def add(self, prompt: AdmittedPrompt) -> None:
        """Put a prompt in the line."""
        self._waiting.append(prompt)

    def cancel(self, request_id: str) -> bool:
        """See `Line`; a request that shares its rows is freed when they end, since they write into its pages."""
        self._release([one for one in self._waiting if one.request.request_id == request_id])
        self._waiting = deque(one for one in self._waiting if one.request.request_id != request_id)
        for one in self._swept:
            one.is_cancelled |= one.request.request_id == request_id
        is_given_up = bool(self._swept) and all(one.is_cancelled for one in self._swept)
        if is_given_up:
            self._end()
        return is_given_up

    def take(self) -> Sequence[Rows]:
        """See `Line`."""
        joinable = list(takewhile(lambda one: not one.runs_alone, self._waiting))
        count = count_joined([one.resolved.plan.num_live for one in joinable], self._sweep_tokens)
        self._swept = [self._waiting.popleft() for _ in range(count)]
        self._rows = CombineRows(self._context, [one.combine for one in self._swept])
        return [self._rows]

    def finish(self) -> None:
        """See `Line`."""
        try:
            logits = self._rows.finish()
        except Exception as error:
            if self._context.is_split:
                raise
            self.fail(error)
            return
        kept = [row for row, one in enumerate(self._swept) if not one.is_cancelled]
        self._start(self._end(), logits[kept])

    def retry(self) -> None:
        """See `Line`."""
        wanted = self._end()
        for one in wanted:
            one.runs_alone = True
            one.combine.drop_snapshots()
        self._waiting.extendleft(reversed(wanted))

    def fail(self, error: Exception) -> None:
        """See `Line`."""
        if len(self._swept) > 1:
            self.retry()
            return
        wanted = self._end()
        self._release(wanted)
        for one in wanted:
            one.request.sink(FailedEvent(EngineError(f"combine failed: {error}")))

    def _end(self) -> list[AdmittedPrompt]:
        """No rows run any more. Returns the prompts that nobody has cancelled; the others are freed."""
        swept, self._swept = self._swept, []
        # What rows hold of a state that has been dropped must not outlive them.
        self._rows = CombineRows(self._context, ())
        self._release([one for one in swept if one.is_cancelled])
        return [one for one in swept if not one.is_cancelled]

    def _release(self, prompts: Sequence[AdmittedPrompt]) -> None:
        for one in prompts:
            one.combine.release()
