"""What becomes of cold segments under `cold: auto`: computed in place and captured behind the reply, or captured first."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.router.domain.request import Cold
from services.router.domain.schedule import Schedule
from services.router.domain.workers import WorkerView

__all__ = ["ColdChoice", "ColdPolicy", "ColdReason", "choose_cold"]


class ColdReason(StrEnum):
    """Why `auto` chose as it did."""

    LIVE_COSTS_LESS = "live_costs_less"
    PARALLEL_COSTS_LESS = "parallel_costs_less"
    COMPUTED_ELSEWHERE = "computed_elsewhere"
    NO_CAPTURE_BEHIND = "no_capture_behind"
    NO_PREFILL_WORKER = "no_prefill_worker"


@dataclass(frozen=True, slots=True)
class ColdChoice:
    """chosen: `parallel` or `live`; the seconds that either way would cost, None where they decided nothing."""

    chosen: Cold
    reason: ColdReason
    parallel_seconds: float | None = None
    live_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ColdPolicy:
    """What applies to one request, and, where that is `auto` and something is cold, what it came to."""

    asked: Cold = Cold.PARALLEL
    choice: ColdChoice | None = None


def choose_cold(parallel: Schedule, live: Schedule, workers: Sequence[WorkerView]) -> ColdChoice:
    """The way that costs everybody less, by the workers' speeds and queues; of two alike the exact one, `live`.

    parallel, live: where the prompt goes with its cold segments captured first, and with them computed in place. A way costs the
    seconds to the first token, and the seconds of its combine once more for each request that runs on that worker, which it
    delays, and for the next one to come. The captures count for neither: the same tokens are captured either way.
    """
    if not parallel.captures.assignments:
        return ColdChoice(Cold.PARALLEL, ColdReason.NO_PREFILL_WORKER)
    seconds = _cost(parallel, workers), _cost(live, workers)
    if seconds[1] <= seconds[0]:
        return ColdChoice(Cold.LIVE, ColdReason.LIVE_COSTS_LESS, *seconds)
    return ColdChoice(Cold.PARALLEL, ColdReason.PARALLEL_COSTS_LESS, *seconds)


def _cost(schedule: Schedule, workers: Sequence[WorkerView]) -> float:
    chosen = schedule.combine
    (running,) = (view.running_requests for view in workers if view.worker_id == chosen.worker_id)
    return schedule.first_token_seconds + (1 + running) * chosen.combine_seconds
