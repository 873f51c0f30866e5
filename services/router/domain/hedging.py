"""When a capture is tried a second time elsewhere: it failed, or it is far behind its own estimate."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.router.domain.assignment import ColdSegment
from services.router.domain.workers import Role, WorkerView, with_role

__all__ = ["CaptureProgress", "HedgePolicy", "choose_hedge", "choose_retry"]


@dataclass(frozen=True, slots=True)
class HedgePolicy:
    """A capture is late after `factor` times its estimate and `slack_seconds` more.

    A worker counts as free with a backlog of at most `free_seconds`.
    """

    factor: float = 2.0
    slack_seconds: float = 0.25
    free_seconds: float = 0.0

    def late_after(self, estimate_seconds: float) -> float:
        """Seconds from a capture's order after which it is late."""
        return self.factor * estimate_seconds + self.slack_seconds


@dataclass(frozen=True, slots=True)
class CaptureProgress:
    """A capture that has not ended. estimate_seconds: from order to arrival, as promised; tried: every worker it went to."""

    segment: ColdSegment
    estimate_seconds: float
    elapsed_seconds: float
    tried: frozenset[str]


def choose_hedge(
    progress: CaptureProgress, workers: Sequence[WorkerView], combine: WorkerView, policy: HedgePolicy
) -> str | None:
    """The worker that is to capture the segment as well, whichever ends first.

    None while the capture is not late, when it has been tried twice, or while no other worker is free.
    """
    is_late = progress.elapsed_seconds > policy.late_after(progress.estimate_seconds)
    if not is_late or len(progress.tried) > 1:
        return None
    free = [worker for worker in workers if worker.backlog_seconds <= policy.free_seconds]
    return choose_retry(progress.segment, progress.tried, free, combine)


def choose_retry(
    segment: ColdSegment, tried: Collection[str], workers: Sequence[WorkerView], combine: WorkerView
) -> str | None:
    """Where a capture that failed is tried once more: of the workers that have not had it, the one with the soonest arrival.

    None where it has been tried twice or nobody else captures; then the segment becomes live in the combine worker.
    """
    if len(tried) > 1:
        return None

    def rank(worker: WorkerView) -> tuple[float, str]:
        start = worker.backlog_seconds
        finish = start + worker.speeds.capture.seconds(segment.num_tokens)
        return combine.transfer_from(worker).arrival(start, finish, segment.num_bytes), worker.worker_id

    others = [worker for worker in with_role(workers, Role.PREFILL) if worker.worker_id not in tried]
    return min(others, key=rank).worker_id if others else None
