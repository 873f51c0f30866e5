"""From a plan to where it is worked on: what scheduling needs to know of a prompt, and the plan as a schedule leaves it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.router.domain.assignment import ColdSegment
from services.router.domain.cold_choice import ColdChoice, ColdPolicy, ColdReason, choose_cold
from services.router.domain.combine_choice import CombineWork, Holding, StoredState
from services.router.domain.model import ModelInfo
from services.router.domain.parts import Reason
from services.router.domain.plan import PartPlan, Plan, Served, serve_live, with_true_snapshots, without_prefix
from services.router.domain.request import Cold, Refresh
from services.router.domain.schedule import Schedule, schedule_request
from services.router.domain.workers import WorkerView

__all__ = ["PlacedPrompt", "apply_schedule", "choose_plan_cold", "cold_segment", "schedule_plan", "state_bytes"]

# Snapshots leave their worker for nobody: no way to them is short enough.
_OUT_OF_REACH_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class PlacedPrompt:
    """A prompt that is ready to be combined: the plan as the chosen worker is to serve it.

    cold: what became of segments without a stored state.
    """

    plan: Plan
    schedule: Schedule
    cold: ColdPolicy = field(default_factory=ColdPolicy)
    refresh: Refresh = field(default_factory=lambda: Refresh(0))

    @property
    def worker_id(self) -> str:
        """Who combines."""
        return self.schedule.combine.worker_id


def schedule_plan(
    plan: Plan, info: ModelInfo, workers: Sequence[WorkerView], waiting: Sequence[int] = ()
) -> Schedule | None:
    """Where to combine the plan's prompt, and who captures what of it is cold and not yet captured.

    waiting: see `schedule_request`. None where no worker accepts prompts.
    """
    cold = [cold_segment(each, info) for each in plan.with_status(Served.COLD) if each.order]
    return schedule_request(_work(plan, info), cold, workers, waiting)


def choose_plan_cold(
    plan: Plan, info: ModelInfo, workers: Sequence[WorkerView], waiting: Sequence[int], can_capture_behind: bool
) -> ColdChoice | None:
    """What `cold: auto` comes to for a plan; None where nothing is cold, or no worker accepts prompts.

    waiting: see `schedule_request`; can_capture_behind: one more capture may follow its reply.
    """
    if not any(each.order for each in plan.with_status(Served.COLD)):
        return None
    if any(plan.with_status(Served.PENDING)):
        # It composes what another request captures in any case.
        return ColdChoice(Cold.PARALLEL, ColdReason.COMPUTED_ELSEWHERE)
    if not can_capture_behind:
        return ColdChoice(Cold.PARALLEL, ColdReason.NO_CAPTURE_BEHIND)
    in_place = serve_live(plan, lambda each: each.served is Served.COLD, Reason.FIRST_USE)
    parallel, live = schedule_plan(plan, info, workers, waiting), schedule_plan(in_place, info, workers)
    return None if parallel is None or live is None else choose_cold(parallel, live, workers)


def state_bytes(info: ModelInfo, num_tokens: int) -> int:
    """What the state of a segment weighs, about."""
    return info.state_bytes + num_tokens * info.state_token_bytes


def cold_segment(each: PartPlan, info: ModelInfo) -> ColdSegment:
    """A part that is to be captured."""
    return ColdSegment(each.key, each.part.num_tokens, state_bytes(info, each.part.num_tokens))


def apply_schedule(plan: Plan, schedule: Schedule, workers: Sequence[WorkerView]) -> Plan:
    """The plan for the chosen combine worker: what nobody can give it is computed in place, with the reason.

    Whether a state is fetched or computed after all is the worker's to say, by what it measures: it tries again now and then
    what was slow.
    """
    known = {worker.worker_id for worker in workers}
    combine_id = schedule.combine.worker_id
    if plan.prefix_key and all(holder.worker_id != combine_id for holder in plan.prefix_holders):
        plan = without_prefix(plan, Reason.HELD_ELSEWHERE)
    plan = serve_live(
        plan,
        lambda each: _is_stored(each) and all(holder.worker_id not in known for holder in each.holders),
        Reason.HELD_ELSEWHERE,
    )
    if not schedule.captures.assignments:
        plan = serve_live(plan, lambda each: each.served is Served.COLD and not each.captured, Reason.NO_PREFILL_WORKER)
    return with_true_snapshots(plan)


def _work(plan: Plan, info: ModelInfo) -> CombineWork:
    profile = info.profile
    seam = profile.min_segment_tokens - profile.min_body
    composed = [each for each in plan.parts if each.served in (Served.HIT, Served.COLD)]
    live = [each for each in plan.parts if each.served in (Served.LIVE, Served.PENDING)]
    return CombineWork(
        stored=(*_prefix(plan), *(_stored(each, info) for each in _once(plan))),
        num_segments=len(composed),
        live_tokens=sum(each.part.num_tokens for each in live) + seam * len(composed),
    )


def _once(plan: Plan) -> Iterator[PartPlan]:
    return (each for each in plan.parts if _is_stored(each) and not each.repeats)


def _is_stored(each: PartPlan) -> bool:
    return each.served is Served.HIT or (each.served is Served.COLD and each.captured is not None)


def _stored(each: PartPlan, info: ModelInfo) -> StoredState:
    return StoredState(each.key, each.part.num_tokens, state_bytes(info, each.part.num_tokens), each.holders)


def _prefix(plan: Plan) -> Iterator[StoredState]:
    if plan.prefix_key:
        tokens = sum(each.part.num_tokens for each in plan.parts if each.served is Served.PREFIX)
        yield StoredState(plan.prefix_key, tokens, _OUT_OF_REACH_BYTES, _in_memory(plan.prefix_holders))


def _in_memory(holders: Sequence[Holding]) -> tuple[Holding, ...]:
    """Snapshots have no tiers."""
    return tuple(Holding(holder.worker_id) for holder in holders)
