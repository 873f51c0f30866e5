"""The line of admitted prompts: gives what waits to the sweeps over the layers, and hands on what is combined."""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile

import torch

from services.worker.engine.admission import CAPTURE_FAILED, NOTHING_REFUSED, Refusals, ResolvedPrompt
from services.worker.engine.capture_rows import CaptureProgress
from services.worker.engine.combine import CombinePass, CombineRows, Prompt
from services.worker.engine.context import EngineContext
from services.worker.engine.fair_line import FairLine
from services.worker.engine.ordered_captures import OrderedCaptures
from services.worker.engine.prompt_refresh import choose, question_tokens, refresh_plan
from services.worker.engine.reach import renewal_scores
from services.worker.engine.refreshed_rows import AttendingRows, RefreshedRows
from services.worker.engine.requests import EngineError, FailedEvent, GenerateRequest
from services.worker.engine.sweep import ALL_LAYERS, Rows
from services.worker.engine.transfer import IncomingState

__all__ = ["AdmittedPrompt", "CombineQueue", "count_joined"]

_log = logging.getLogger(__name__)


def count_joined(live_tokens: Sequence[int], limit: int) -> int:
    """How many prompts at the head of a line share a sweep: as many as have `limit` live tokens together, at least one."""
    return max(1, bisect_right(list(accumulate(live_tokens)), limit))


@dataclass(slots=True)
class AdmittedPrompt:
    """A request with everything that it needs to capture and combine. since: when it was submitted.

    arriving: states that it uses and that are on their way; blocked: seconds for which its sweep waited for each layer of theirs;
    is_cancelled: nobody wants it any more, and its rows have still to end; runs_alone: a sweep failed that it shared, or it
    refreshes blocks; refreshes: blocks, if its choice finds any; chooses: which, it has yet to find out.
    """

    request: GenerateRequest
    since: float
    resolved: ResolvedPrompt
    combine: CombinePass
    captures: OrderedCaptures
    arriving: Sequence[IncomingState] = ()
    refusals: Refusals = NOTHING_REFUSED
    blocked: dict[int, float] = field(default_factory=dict)
    admitted_at: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    runs_alone: bool = False
    refreshes: bool = field(init=False)
    chooses: bool = field(init=False)

    def __post_init__(self) -> None:
        self.refreshes = self.chooses = self.resolved.plan.refresh_tokens > 0

    @property
    def runs_ahead(self) -> bool:
        """The next chunk of its captures runs ahead of it: of several, or where it has to look at what is captured first."""
        return self.captures.runs_ahead or (self.chooses and bool(self.captures.keys))

    def refresh(self, attention: torch.Tensor) -> None:
        """Take the blocks to be refreshed, by how much of the question's attention falls on every token and what reaches it."""
        order, elapsed = self.request.refresh, time.monotonic() - self.admitted_at
        self.chooses = False
        if order is None:
            return
        plan = self.combine.plan
        refreshed = choose(plan, order, renewal_scores(plan, attention).tolist(), elapsed)
        self.resolved = self.resolved.refresh(refreshed)
        if any(refreshed.blocks) or refreshed.whole:
            self.combine.refresh(refresh_plan(plan, refreshed))
            self.runs_alone = True

    @property
    def num_rows(self) -> int:
        """Tokens that it brings to a sweep in which it is combined."""
        return self.combine.plan.num_live + self.captures.next_tokens

    @property
    def blocked_seconds(self) -> float:
        """For which nothing of it ran, since layers had yet to come."""
        return sum(self.blocked.values())

    def release(self) -> None:
        """Give back everything."""
        self.captures.abandon()
        self.combine.release()


class CombineQueue:
    """Combines, in the order of a `FairLine`. What arrives while a sweep runs waits for the next. Lives on the engine's thread.

    The last chunk of what a prompt captures shares the sweep in which it is combined: in every layer captures come first,
    and leave there what the prompt composes. Chunks before that run ahead of it, in sweeps of their own.

    See `Line`. `start` gets the prompts that a sweep has combined, and their last logits `[B, vocabulary]`; `readmit` one
    that has given up its captures or its refresh in a sweep that failed, with all that it held, and what it is refused now.
    """

    def __init__(
        self,
        context: EngineContext,
        sweep_tokens: int,
        start: Callable[[Sequence[AdmittedPrompt], torch.Tensor], None],
        readmit: Callable[[AdmittedPrompt, Refusals], None],
    ) -> None:
        self._context = context
        self._sweep_tokens = sweep_tokens
        self._start = start
        self._readmit = readmit
        self._waiting = FairLine[AdmittedPrompt]()
        self._swept: list[AdmittedPrompt] = []
        # None while chunks run ahead.
        self._rows: CombineRows | None = None

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
        return [one.combine.prompt for one in self._admitted]

    @property
    def captured_keys(self) -> set[bytes]:
        """Segments whose capture has yet to end."""
        return {key for one in self._admitted for key in one.captures.keys}

    def held_pages(self) -> list[tuple[int, ...]]:
        """Pages of captures."""
        return [one.captures.held_pages for one in self._admitted]

    def find_capture(self, key: bytes) -> CaptureProgress | None:
        """The capture that one of the prompts has ordered and that has not ended."""
        found = (one.captures.find(key) for one in self._admitted)
        return next((progress for progress in found if progress is not None), None)

    @property
    def layers_present(self) -> int:
        """See `Line`: of states on their way, those that have come."""
        if self._rows is None:
            return ALL_LAYERS
        coming = [state.layers_present for one in self._swept for state in one.arriving if not state.is_present]
        return min(coming, default=ALL_LAYERS)

    def note_blocked(self, layer: int, seconds: float) -> None:
        """See `Line`."""
        for one in self._swept:
            one.blocked[layer] = one.blocked.get(layer, 0.0) + seconds

    def withdraw(self, incoming: IncomingState) -> tuple[list[AdmittedPrompt], bool]:
        """Take out the prompts that use a state which will not come, with all that they hold given back.

        Returns them, and whether rows in the sweep are given up with them. Prompts with states on their way share no sweep.
        """
        using = [one for one in self._admitted if incoming in one.arriving]
        is_swept = any(one in using for one in self._swept)
        self._waiting.take_out(lambda one: one in using)
        wanted = [one for one in using if not one.is_cancelled]
        if is_swept:
            self._swept, self._rows = [], None
        self._release(using)
        return wanted, is_swept

    @property
    def room(self) -> int:
        """Tokens that others may bring to the running sweep."""
        if self._rows is None or any(one.runs_alone or one.chooses for one in self._swept):
            return 0
        return max(0, self._sweep_tokens - self._rows.num_tokens)

    def add(self, prompt: AdmittedPrompt) -> None:
        """Put a prompt in the line."""
        self._waiting.add(prompt)

    def cancel(self, request_id: str) -> bool:
        """See `Line`; a request that shares its rows is freed when they end, since they write into its pages."""
        self._release(self._waiting.take_out(lambda one: one.request.request_id == request_id))
        for one in self._swept:
            one.is_cancelled |= one.request.request_id == request_id
        is_given_up = bool(self._swept) and all(one.is_cancelled for one in self._swept)
        if is_given_up:
            self._end()
        return is_given_up

    def take(self) -> Sequence[Rows]:
        """See `Line`."""
        head = self._waiting.head
        if head.runs_ahead:
            self._swept = [self._waiting.pop()]
            return self._swept[0].captures.take_chunk()
        if head.chooses or head.combine.layout.sides:
            return self._take_refreshing(self._waiting.pop())
        joinable = list(takewhile(lambda one: not (one.runs_alone or one.chooses or one.runs_ahead), self._waiting))
        count = count_joined([one.num_rows for one in joinable], self._sweep_tokens)
        self._swept = [self._waiting.pop() for _ in range(count)]
        self._rows = CombineRows(self._context, [one.combine for one in self._swept])
        return [*(rows for one in self._swept for rows in one.captures.take_chunk()), self._rows]

    def _take_refreshing(self, one: AdmittedPrompt) -> Sequence[Rows]:
        self._swept = [one]
        asked = question_tokens(one.combine.plan) if one.chooses else 0
        self._rows = (
            AttendingRows(self._context, one.combine, asked)
            if one.chooses
            else RefreshedRows(self._context, one.combine)
        )
        return [self._rows]

    def finish(self) -> None:
        """See `Line`."""
        rows = self._rows
        wanted = [one for one in self._swept if not one.is_cancelled]
        try:
            logits = None if rows is None or isinstance(rows, AttendingRows) else rows.finish()
            for one in wanted:
                one.captures.finish_chunk()
                if isinstance(rows, AttendingRows):
                    one.refresh(rows.attention)
        except Exception as error:
            if self._context.is_split:
                raise
            self.fail(error)
            return
        kept = [row for row, one in enumerate(self._swept) if not one.is_cancelled]
        self._end()
        if logits is None:
            self._waiting.put_first(wanted)
        else:
            self._start(wanted, logits if len(kept) == len(logits) else logits[kept])

    def retry(self) -> None:
        """See `Line`; whatever failed, captures are given up with it."""
        wanted = self._end()
        for one in wanted:
            one.runs_alone = True
            one.combine.drop_snapshots()
        self._waiting.put_first(one for one in reversed(wanted) if not one.captures.keys)
        for one in reversed(wanted):
            self._give_up_captures(one, "a sweep failed that it shared")

    def fail(self, error: Exception) -> None:
        """See `Line`; one that captures, or refreshes, is served without."""
        if len(self._swept) > 1:
            self.retry()
            return
        for one in self._end():
            if one.captures.keys:
                self._give_up_captures(one, f"capture failed: {error}")
            elif one.refreshes:
                _log.error("a refresh failed; its prompt is served without", exc_info=error)
                one.release()
                # What it had captured is told already.
                self._readmit(one, replace(one.refusals, captures=CAPTURE_FAILED, refresh=True))
            else:
                one.release()
                one.request.sink(FailedEvent(EngineError(f"combine failed: {error}")))

    @property
    def _admitted(self) -> Sequence[AdmittedPrompt]:
        return (*self._swept, *self._waiting)

    def _give_up_captures(self, one: AdmittedPrompt, reason: str) -> None:
        if one.captures.keys:
            one.captures.fail(reason)
            one.release()
            self._readmit(one, replace(one.refusals, captures=CAPTURE_FAILED))

    def _end(self) -> list[AdmittedPrompt]:
        """No rows run any more. Returns the prompts that nobody has cancelled; the others are freed."""
        swept, self._swept = self._swept, []
        # What rows hold of a state that has been dropped must not outlive them.
        self._rows = None
        self._release([one for one in swept if one.is_cancelled])
        return [one for one in swept if not one.is_cancelled]

    def _release(self, prompts: Sequence[AdmittedPrompt]) -> None:
        for one in prompts:
            one.release()
