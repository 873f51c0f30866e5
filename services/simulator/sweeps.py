"""When a combine may run, layer by layer behind what it waits for, alone or in the sweep of its own captures."""

from dataclasses import dataclass

from services.router.domain.assignment import ColdSegment
from services.simulator.costs import Costs
from services.simulator.worker import Prompt, Worker

__all__ = ["Joined", "join", "ready_at"]


@dataclass(frozen=True, slots=True)
class Joined:
    """A sweep of captures with the prompts that share it."""

    prompts: list[Prompt]
    until: float


def ready_at(prompt: Prompt, costs: Costs) -> float:
    """The first moment from which a combine of its own never waits for a layer."""
    seconds = costs.combine.pass_seconds + prompt.own_seconds
    return max(prompt.known.first, prompt.known.last - seconds * (costs.layers - 1) / costs.layers)


def join(worker: Worker, complete: list[ColdSegment], now: float, seconds: float) -> Joined:
    """Prompts whose last captures are these share their sweep, and with it the pass over the weights, where they end sooner so.

    In each layer the rows of captures go first; a sweep waits for layers of states that come from elsewhere.
    """
    until = now + seconds
    prompts: list[Prompt] = []
    keys = {segment.key for segment in complete}
    for prompt in worker.prompts.values():
        if not prompt.outstanding or not prompt.outstanding <= keys:
            continue
        shared = _shared_until(prompt, until + prompt.own_seconds, now, worker.costs.layers)
        pass_seconds = worker.costs.combine.pass_seconds
        if shared <= max(until, ready_at(prompt, worker.costs)) + pass_seconds + prompt.own_seconds:
            prompts.append(prompt)
            until = shared
    return Joined(prompts, until)


def _shared_until(prompt: Prompt, until: float, now: float, layers: int) -> float:
    """When a sweep ends that would end at `until` if nothing came late."""
    layer = (until - now) / layers
    rows = prompt.own_seconds / layers
    return max(until, prompt.known.first + rows + layer * (layers - 1), prompt.known.last + rows)
