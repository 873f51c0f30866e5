"""Which worker combines a prompt: where its first token is to be expected soonest, with what must be fetched for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.router.domain.workers import Role, WorkerView, with_role

__all__ = ["CombineChoice", "CombineWork", "Fetch", "Holding", "StoredState", "choose_combine_worker"]


@dataclass(frozen=True, slots=True)
class Holding:
    """A worker that holds a state, and in which of its tiers."""

    worker_id: str
    tier: str = ""


@dataclass(frozen=True, slots=True)
class StoredState:
    """A hit, or the prefix snapshot: what it weighs, what computing it in place would take, and who holds it."""

    key: bytes
    num_tokens: int
    num_bytes: int
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class CombineWork:
    """What a prompt asks of its combine worker. num_segments: all that are composed, cold ones too."""

    stored: tuple[StoredState, ...]
    num_segments: int
    live_tokens: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """A state that the combine worker reads from a holder: itself, where it lies in a lower tier, or another worker."""

    key: bytes
    holding: Holding
    seconds: float


@dataclass(frozen=True, slots=True)
class CombineChoice:
    """Where to combine. computed: keys that are computed in place, since that is quicker or nobody can be asked.

    fetch_seconds: of all fetches, one after the other; combine_seconds: with what is computed in place; first_token_seconds:
    from now, as far as what is stored decides it.
    """

    worker_id: str
    fetches: tuple[Fetch, ...]
    computed: tuple[bytes, ...]
    fetch_seconds: float
    combine_seconds: float
    first_token_seconds: float


def choose_combine_worker(work: CombineWork, workers: Sequence[WorkerView]) -> CombineChoice | None:
    """The worker with the soonest first token, then the least to fetch, then the fewest running requests, then by id.

    None where no worker accepts prompts.
    """
    known = {worker.worker_id: worker for worker in workers}
    candidates = with_role(workers, Role.COMBINE)
    choices = [(_estimate(work, worker, known), worker) for worker in candidates]
    if not choices:
        return None
    return min(choices, key=lambda each: _rank(*each))[0]


def _rank(choice: CombineChoice, worker: WorkerView) -> tuple[float, float, int, str]:
    return choice.first_token_seconds, choice.fetch_seconds, worker.running_requests, worker.worker_id


def _estimate(work: CombineWork, worker: WorkerView, known: dict[str, WorkerView]) -> CombineChoice:
    """Fetches run while the worker does what it has; what is computed in place lengthens the combine."""
    speed = worker.speeds.combine
    fetches: list[Fetch] = []
    computed: list[StoredState] = []
    for state in work.stored:
        fetch = _quickest(state, worker, known)
        if fetch is None or fetch.seconds > state.num_tokens * speed.token_seconds:
            computed.append(state)
        elif fetch.seconds > 0:
            fetches.append(fetch)
    fetching = sum(fetch.seconds for fetch in fetches)
    live_tokens = work.live_tokens + sum(state.num_tokens for state in computed)
    combining = speed.seconds(work.num_segments - len(computed), live_tokens)
    combining += worker.running_requests * speed.running_seconds
    first_token = max(worker.backlog_seconds, fetching) + combining
    keys = tuple(state.key for state in computed)
    return CombineChoice(worker.worker_id, tuple(fetches), keys, fetching, combining, first_token)


def _quickest(state: StoredState, worker: WorkerView, known: dict[str, WorkerView]) -> Fetch | None:
    """From the holder with the shortest way; None where no holder is known."""
    fetches = [
        Fetch(state.key, holding, _way_seconds(state, worker, known[holding.worker_id], holding.tier))
        for holding in state.holdings
        if holding.worker_id in known
    ]
    return min(fetches, key=lambda fetch: (fetch.seconds, fetch.holding.worker_id, fetch.holding.tier), default=None)


def _way_seconds(state: StoredState, worker: WorkerView, holder: WorkerView, tier: str) -> float:
    """Out of the holder's tier, then to the worker where that is another one."""
    lower = holder.speeds.tiers.get(tier)
    reading = lower.seconds(state.num_bytes) if lower else 0.0
    return reading + worker.transfer_from(holder).seconds(state.num_bytes)
