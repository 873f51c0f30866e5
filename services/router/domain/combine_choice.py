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
    sources = [_read_sources(state, known) for state in work.stored]
    choices = [(_estimate(work, sources, worker), worker) for worker in with_role(workers, Role.COMBINE)]
    if not choices:
        return None
    return min(choices, key=lambda each: _rank(*each))[0]


def _rank(choice: CombineChoice, worker: WorkerView) -> tuple[float, float, int, str]:
    return choice.first_token_seconds, choice.fetch_seconds, worker.running_requests, worker.worker_id


@dataclass(frozen=True, slots=True)
class _Source:
    """A holder, on its host. seconds: until it has the state in the memory that it sends from."""

    seconds: float
    holding: Holding
    host: str

    @property
    def rank(self) -> tuple[float, str, str]:
        return self.seconds, self.holding.worker_id, self.holding.tier


@dataclass(frozen=True, slots=True)
class _Sources:
    """A state, and where it may be read: by each holder itself, and by others, who ask the quickest holder of a host."""

    state: StoredState
    by_holder: dict[str, _Source]
    by_host: dict[str, _Source]

    def quickest(self, worker: WorkerView) -> tuple[float, _Source] | None:
        """Seconds until the worker has it, and from where; None where no holder is known."""
        own = self.by_holder.get(worker.worker_id)
        if own is not None and own.seconds == 0:
            return 0.0, own
        ways = [] if own is None else [(own.seconds, own)]
        for host, source in self.by_host.items():
            if source is not own:
                speed = worker.speeds.same_host if host == worker.host else worker.speeds.other_host
                ways.append((source.seconds + speed.seconds(self.state.num_bytes), source))
        return min(ways, key=lambda way: (way[0], way[1].rank), default=None)


def _read_sources(state: StoredState, known: dict[str, WorkerView]) -> _Sources:
    by_holder: dict[str, _Source] = {}
    by_host: dict[str, _Source] = {}
    for holding in state.holdings:
        holder = known.get(holding.worker_id)
        if holder is None:
            continue
        lower = holder.speeds.tiers.get(holding.tier)
        source = _Source(lower.seconds(state.num_bytes) if lower else 0.0, holding, holder.host)
        for table, name in ((by_holder, holder.worker_id), (by_host, holder.host)):
            if name not in table or source.rank < table[name].rank:
                table[name] = source
    return _Sources(state, by_holder, by_host)


def _estimate(work: CombineWork, sources: Sequence[_Sources], worker: WorkerView) -> CombineChoice:
    """Fetches run while the worker does what it has; what is computed in place lengthens the combine."""
    speed = worker.speeds.combine
    fetches: list[Fetch] = []
    computed: list[bytes] = []
    fetching, live_tokens = 0.0, work.live_tokens
    for each in sources:
        found = each.quickest(worker)
        if found is None or found[0] > each.state.num_tokens * speed.token_seconds:
            computed.append(each.state.key)
            live_tokens += each.state.num_tokens
        elif found[0] > 0:
            fetches.append(Fetch(each.state.key, found[1].holding, found[0]))
            fetching += found[0]
    combining = speed.seconds(work.num_segments - len(computed), live_tokens)
    combining += worker.running_requests * speed.running_seconds
    first_token = max(worker.backlog_seconds, fetching) + combining
    return CombineChoice(worker.worker_id, tuple(fetches), tuple(computed), fetching, combining, first_token)
