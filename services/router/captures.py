"""Captures of one request on several workers: a failed one is tried once more elsewhere, a late one as well elsewhere."""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import HypicError
from services.common.telemetry import get_logger
from services.router.domain.assignment import Assignment, ColdSegment, assign_captures
from services.router.domain.hedging import CaptureProgress, HedgePolicy, choose_hedge, choose_retry
from services.router.domain.plan import CaptureCause, Captured
from services.router.domain.ports import CaptureBatch, CaptureOrder, Work, Workers
from services.router.domain.unmeasured import UNMEASURED
from services.router.domain.workers import WorkerView

__all__ = ["CaptureCounts", "CaptureOutcome", "CaptureRun", "Capturer"]

# A capture that is not late yet is looked at again; a free worker may have come.
_LEAST_LOOK_SECONDS = 0.02
_LOOK_SECONDS = 0.1
_TOO_LATE, _NOBODY = "the capture was not done in time", "no worker with the role prefill takes new work"


class CaptureCounts(Protocol):
    """Hears of every capture that a worker was asked for."""

    def count_capture(self, cause: CaptureCause, is_stored: bool) -> None:
        """One has ended, or was given up."""
        ...


@dataclass(frozen=True, slots=True)
class CaptureOutcome:
    """By key: where segments are stored now, and why others are not."""

    stored: Mapping[bytes, Captured]
    reasons: Mapping[bytes, str]


@dataclass(frozen=True, slots=True)
class _Ended:
    key: bytes
    worker_id: str
    cause: CaptureCause
    reason: str


@dataclass(slots=True)
class _Open:
    """A segment that nobody has stored yet. tried: the workers that were asked, running: those that have not answered."""

    segment: ColdSegment
    estimate_seconds: float
    began_at: float
    tried: list[str]
    running: set[str]

    def progress(self, now: float) -> CaptureProgress:
        """As hedging sees it."""
        return CaptureProgress(self.segment, self.estimate_seconds, now - self.began_at, frozenset(self.tried))


class CaptureRun:
    """Runs assigned captures. Leaving its context ends what still runs.

    combine: the view of the worker that is to have the states; is_background: nobody waits.
    """

    def __init__(
        self,
        workers: Workers,
        combine: WorkerView,
        policy: HedgePolicy,
        counts: CaptureCounts,
        is_background: bool = False,
    ) -> None:
        self._workers = workers
        self._combine = combine
        self._policy = policy
        self._counts = counts
        self._is_background = is_background
        self._events: asyncio.Queue[_Ended] = asyncio.Queue()
        self._calls: dict[asyncio.Task[None], set[bytes]] = {}
        self._open: dict[bytes, _Open] = {}
        self._orders: Mapping[bytes, CaptureOrder] = {}
        self._timeout_seconds = 0.0
        self._alternates: Mapping[bytes, str] | None = None
        self._stored: dict[bytes, Captured] = {}
        self._reasons: dict[bytes, str] = {}

    async def run(
        self,
        assignments: Sequence[Assignment],
        orders: Collection[CaptureOrder],
        timeout_seconds: float,
        alternates: Mapping[bytes, str] | None = None,
    ) -> CaptureOutcome:
        """Returns when every segment is stored or given up. What fails raises nothing.

        alternates: the only worker that each segment may be tried on once more, by key; any where they are not given.
        """
        self._alternates = alternates
        self._timeout_seconds = timeout_seconds
        self._orders = {order.key: order for order in orders}
        ends_at = time.monotonic() + timeout_seconds
        try:
            for each in assignments:
                self._open[each.segment.key] = _Open(each.segment, each.arrival_seconds, time.monotonic(), [], set())
            for worker_id in dict.fromkeys(each.worker_id for each in assignments):
                own = [each for each in assignments if each.worker_id == worker_id]
                seconds = max(each.finish_seconds for each in own) - min(each.start_seconds for each in own)
                self._start(worker_id, [each.segment.key for each in own], CaptureCause.ASSIGNED, seconds)
            while self._open and (left := ends_at - time.monotonic()) > 0:
                try:
                    async with asyncio.timeout(min(left, self._look_seconds())):
                        ended = await self._events.get()
                except TimeoutError:
                    self._hedge()
                else:
                    self._take(ended)
        finally:
            await self._end()
        assigned = {each.segment.key for each in assignments}
        reasons = {
            order.key: self._reasons.get(order.key, _TOO_LATE if order.key in assigned else _NOBODY)
            for order in orders
            if order.key not in self._stored
        }
        return CaptureOutcome(self._stored, reasons)

    def _start(self, worker_id: str, keys: Sequence[bytes], cause: CaptureCause, seconds: float) -> None:
        for key in keys:
            self._open[key].tried.append(worker_id)
            self._open[key].running.add(worker_id)
        task = asyncio.create_task(self._follow(worker_id, keys, cause, seconds))
        self._calls[task] = set(keys)
        task.add_done_callback(self._calls.pop)

    async def _follow(self, worker_id: str, keys: Sequence[bytes], cause: CaptureCause, seconds: float) -> None:
        """One worker's stream; every segment gets one event, whatever happens."""
        batch = CaptureBatch(tuple(self._orders[key] for key in keys), self._is_background)
        work = Work(seconds, sum(len(order.token_ids) for order in batch.orders))
        waited = dict.fromkeys(keys)
        reason = "the worker ended the stream early"
        try:
            with self._workers.occupy(worker_id, work):
                async with aclosing(self._workers.find(worker_id).capture(batch, self._timeout_seconds)) as results:
                    async for result in results:
                        waited.pop(result.key, None)
                        self._say(_Ended(result.key, worker_id, cause, "" if result.is_stored else result.reason))
        except HypicError as error:
            reason = str(error)
        for key in waited:
            self._say(_Ended(key, worker_id, cause, reason or "failed"))

    def _say(self, ended: _Ended) -> None:
        self._counts.count_capture(ended.cause, not ended.reason)
        self._events.put_nowait(ended)

    def _take(self, ended: _Ended) -> None:
        one = self._open.get(ended.key)
        if one is None:
            return
        one.running.discard(ended.worker_id)
        if not ended.reason:
            seconds = time.monotonic() - one.began_at
            self._stored[ended.key] = Captured(ended.worker_id, ended.cause, seconds)
            self._close(ended.key)
            return
        get_logger().warning("capture_failed", worker_id=ended.worker_id, reason=ended.reason)
        self._reasons[ended.key] = ended.reason
        if not one.running and not self._try_again(one, CaptureCause.RETRIED):
            self._close(ended.key)

    def _try_again(self, one: _Open, cause: CaptureCause) -> bool:
        """Ask another worker for a segment; False where none is left to ask."""
        views = self._workers.views()
        if self._alternates is not None:
            views = tuple(view for view in views if view.worker_id == self._alternates.get(one.segment.key))
        if cause is CaptureCause.HEDGED:
            chosen = choose_hedge(one.progress(time.monotonic()), views, self._combine, self._policy)
        else:
            chosen = choose_retry(one.segment, one.tried, views, self._combine)
        if chosen is None:
            return False
        (view,) = (view for view in views if view.worker_id == chosen)
        self._start(chosen, [one.segment.key], cause, view.speeds.capture.seconds(one.segment.num_tokens))
        return True

    def _hedge(self) -> None:
        for one in list(self._open.values()):
            self._try_again(one, CaptureCause.HEDGED)

    def _look_seconds(self) -> float:
        """Until the first capture may be late."""
        now = time.monotonic()
        untried = [one for one in self._open.values() if len(one.tried) == 1]
        late_at = [one.began_at + self._policy.late_after(one.estimate_seconds) for one in untried]
        soonest = min(late_at, default=now + _LOOK_SECONDS) - now
        return max(_LEAST_LOOK_SECONDS, soonest if soonest > 0 else _LOOK_SECONDS)

    def _close(self, key: bytes) -> None:
        """Nobody waits for a segment any more: calls that were for nothing else end."""
        del self._open[key]
        for task, keys in self._calls.items():
            if keys.isdisjoint(self._open):
                task.cancel()

    async def _end(self) -> None:
        tasks = list(self._calls)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Capturer:
    """Captures for all requests of this router. waiting: for how many segments each request waits that waits now."""

    def __init__(self, workers: Workers, policy: HedgePolicy, counts: CaptureCounts) -> None:
        self._workers = workers
        self._policy = policy
        self._counts = counts
        self.waiting: list[int] = []

    async def run(
        self,
        assignments: Sequence[Assignment],
        orders: Collection[CaptureOrder],
        combine: WorkerView,
        timeout_seconds: float,
        alternates: Mapping[bytes, str] | None = None,
    ) -> CaptureOutcome:
        """What a schedule has assigned, for a request that waits; see `CaptureRun.run`."""
        self.waiting.append(len(assignments))
        try:
            run = CaptureRun(self._workers, combine, self._policy, self._counts)
            return await run.run(assignments, orders, timeout_seconds, alternates)
        finally:
            self.waiting.remove(len(assignments))

    def choose_alternate(self, assignment: Assignment, combine: WorkerView) -> str:
        """Who captures a segment as well, when its worker fails or is late; empty where nobody but the combine worker could."""
        others = [view for view in self._workers.views() if view.worker_id != combine.worker_id]
        return choose_retry(assignment.segment, (assignment.worker_id,), others, combine) or ""

    def late_after(self, assignment: Assignment) -> float:
        """Seconds after which an assigned capture is late."""
        return self._policy.late_after(assignment.arrival_seconds)

    async def capture_apart(
        self, segments: Collection[ColdSegment], orders: Collection[CaptureOrder], timeout_seconds: float
    ) -> CaptureOutcome:
        """Captures that no prompt waits for: wherever they end first, behind everything else."""
        views = self._workers.views()
        # Whoever will combine them is not known: the way to it does not count.
        nowhere = WorkerView("", UNMEASURED)
        plan = assign_captures(segments, views, nowhere, self.waiting)
        run = CaptureRun(self._workers, nowhere, self._policy, self._counts, is_background=True)
        return await run.run(plan.assignments, orders, timeout_seconds)
