"""Where one request's work goes: the combine worker first, then the cold segments. The router and the simulator call this."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.router.domain.assignment import CapturePlan, ColdSegment, assign_captures
from services.router.domain.combine_choice import CombineChoice, CombineWork, choose_combine_worker
from services.router.domain.workers import WorkerView

__all__ = ["Schedule", "schedule_request"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """combine: where the request is combined and what is fetched for it; captures: where its cold segments are computed."""

    combine: CombineChoice
    captures: CapturePlan

    @property
    def first_token_seconds(self) -> float:
        """From now, as the speeds promise: what is stored and what is captured, whichever comes later."""
        arrived = self.captures.arrival_seconds + self.combine.combine_seconds
        return max(self.combine.first_token_seconds, arrived)


def schedule_request(
    work: CombineWork, cold: Iterable[ColdSegment], workers: Sequence[WorkerView], waiting: Sequence[int] = ()
) -> Schedule | None:
    """Deterministic: the same views give the same schedule. None where no worker accepts prompts.

    waiting: of every other request that waits for captures now, how many segments it waits for.
    """
    combine = choose_combine_worker(work, workers)
    if combine is None:
        return None
    (view,) = (worker for worker in workers if worker.worker_id == combine.worker_id)
    return Schedule(combine, assign_captures(cold, workers, view, waiting))
