"""Which worker captures which cold segment: longest first, each where it reaches the combine worker soonest.

With equal speeds and nothing to transfer that is list scheduling in decreasing order: the last capture ends within
`4/3 − 1/(3m)` times the least possible (Graham, 1969).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.router.domain.workers import Role, WorkerView, with_role

__all__ = ["Assignment", "CapturePlan", "ColdSegment", "assign_captures", "distinct", "fan_out"]


@dataclass(frozen=True, slots=True)
class ColdSegment:
    """A segment to capture; num_bytes: what its state will weigh."""

    key: bytes
    num_tokens: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A capture on a worker, with what its speeds promise, in seconds from now.

    arrival_seconds: when the combine worker has all of the state.
    """

    segment: ColdSegment
    worker_id: str
    start_seconds: float
    finish_seconds: float
    arrival_seconds: float


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Captures, longest first, which is also each worker's order. Empty where no worker captures."""

    assignments: tuple[Assignment, ...]

    @property
    def arrival_seconds(self) -> float:
        """When the combine worker has every state; 0 without captures."""
        return max((each.arrival_seconds for each in self.assignments), default=0.0)

    def of_worker(self, worker_id: str) -> tuple[Assignment, ...]:
        """What one worker captures, in its order."""
        return tuple(each for each in self.assignments if each.worker_id == worker_id)


def fan_out(num_workers: int, num_segments: int, waiting: Sequence[int] = ()) -> int:
    """How many workers a request may capture on: its max-min share, rounded up.

    waiting: of every other request that waits for captures, how many segments it waits for, each of which can occupy one worker.
    Workers are divided evenly, save that what a request cannot use goes to the others. Nobody gets fewer than one, and a
    request that is alone as many as it has segments.
    """
    left = num_workers
    wishes = sorted(max(wish, 1) for wish in waiting)
    for index, wish in enumerate(wishes):
        sharing = len(wishes) - index + 1
        if min(wish, num_segments) * sharing >= left:
            return max(math.ceil(left / sharing), 1)
        if wish >= num_segments:
            break
        left -= wish
    return min(num_segments, left)


def distinct(segments: Iterable[ColdSegment]) -> list[ColdSegment]:
    """Each key once: a segment that stands twice in a prompt is one capture."""
    return list({segment.key: segment for segment in segments}.values())


def assign_captures(
    segments: Iterable[ColdSegment], workers: Sequence[WorkerView], combine: WorkerView, waiting: Sequence[int] = ()
) -> CapturePlan:
    """Assign every segment, by measured speeds, backlogs and the way to the combine worker, which may capture too.

    waiting: segments that each other request waits for; see `fan_out`. Of equal workers the combine worker comes first, then
    the smaller id.
    """
    ordered = sorted(distinct(segments), key=lambda segment: (-segment.num_tokens, segment.key))
    capturing = [_Queue(worker, combine) for worker in with_role(workers, Role.PREFILL)]
    if not ordered or not capturing:
        return CapturePlan(())
    capturing.sort(key=lambda queue: queue.rank(ordered[0], 0.0))
    chosen = capturing[: fan_out(len(capturing), len(ordered), waiting)]
    assignments: list[Assignment] = []
    # All that comes from elsewhere shares the combine worker's way in.
    received = 0.0
    for segment in ordered:
        queue = min(chosen, key=lambda queue: queue.rank(segment, received))
        assignments.append(queue.append(segment, received))
        received += queue.sending_seconds(segment)
    return CapturePlan(tuple(assignments))


class _Queue:
    """What one worker is to capture for this request."""

    def __init__(self, worker: WorkerView, combine: WorkerView) -> None:
        self._worker = worker
        self._transfer = combine.transfer_from(worker)
        self._is_remote = worker.worker_id != combine.worker_id
        self._num_tokens = 0
        self._free = worker.backlog_seconds

    def rank(self, segment: ColdSegment, received: float) -> tuple[float, bool, str]:
        """By the segment's arrival."""
        return self._arrival(segment, self._finish(segment), received), self._is_remote, self._worker.worker_id

    def append(self, segment: ColdSegment, received: float) -> Assignment:
        """Put the segment at the end."""
        start, finish = self._free, self._finish(segment)
        self._num_tokens += segment.num_tokens
        self._free = finish
        arrival = self._arrival(segment, finish, received)
        return Assignment(segment, self._worker.worker_id, start, finish, arrival)

    def sending_seconds(self, segment: ColdSegment) -> float:
        """How long the segment's bytes keep the combine worker's way in busy."""
        return segment.num_bytes / self._transfer.bytes_per_second

    def _finish(self, segment: ColdSegment) -> float:
        tokens = self._num_tokens + segment.num_tokens
        return self._worker.backlog_seconds + self._worker.speeds.capture.seconds(tokens)

    def _arrival(self, segment: ColdSegment, finish: float, received: float) -> float:
        if not self._is_remote:
            return finish
        speed = self._worker.speeds.capture
        # Layers are whole, and go out, in the last pass of a segment that takes several.
        last_pass = speed.seconds(min(segment.num_tokens, speed.pass_tokens))
        begins = max(self._free, finish - last_pass)
        arrival = self._transfer.arrival(begins, finish, segment.num_bytes)
        return max(arrival, received + self._transfer.seconds(segment.num_bytes))
