"""When to refuse a request before it waits in vain: by what the workers have to do now, so that it ends as their load falls."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.router.domain.workers import Role, WorkerView, with_role

__all__ = ["Shed", "SheddingPolicy", "shed"]

_LONGEST_RETRY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class SheddingPolicy:
    """queue_seconds: the longest wait for the work ahead that a request is let in for; requests_per_worker: how many each worker
    that combines may have, running or waiting, of all routers.
    """

    queue_seconds: float
    requests_per_worker: int


@dataclass(frozen=True, slots=True)
class Shed:
    """Why a request is refused, and when to come back, in seconds."""

    reason: str
    retry_after_seconds: float


def shed(workers: Sequence[WorkerView], policy: SheddingPolicy) -> Shed | None:
    """Whether one more request is too many for every worker; None where one can take it, or there is none to ask.

    Deterministic, and without memory.
    """
    views = with_role(workers, Role.COMBINE)
    if not views:
        return None
    fewest = min(view.running_requests for view in views)
    if fewest >= policy.requests_per_worker:
        # One of them has to end first; nobody knows when.
        return Shed(f"every worker has {policy.requests_per_worker} requests or more", 1.0)
    able = [view for view in views if view.running_requests < policy.requests_per_worker]
    soonest = min(view.backlog_seconds for view in able)
    if soonest <= policy.queue_seconds:
        return None
    wait = min(soonest - policy.queue_seconds, _LONGEST_RETRY_SECONDS)
    return Shed(f"the least busy worker has work for {soonest:.1f} s", wait)
