"""The worker that combines: what lies there, how it gets there, and what else it has to do."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cluster.instances import COMBINE, worker_view
from services.router.domain.combine_choice import CombineWork, Holding, StoredState, choose_combine_worker
from services.router.domain.workers import Role, TransferSpeed, WorkerView

GBPS = 1_000_000_000
DISK = TransferSpeed(0.0, 2 * GBPS)


def view(name: str, **fields: object) -> WorkerView:
    base = worker_view(name, 20e-6)
    speeds = replace(
        base.speeds,
        same_host=TransferSpeed(0.001, 10 * GBPS),
        other_host=TransferSpeed(0.002, GBPS),
        tiers={"disk": DISK},
    )
    return replace(base, speeds=speeds, **fields)  # type: ignore[arg-type] # fields of a view


def stored(key: int, *holders: str, megabytes: int = 100, tokens: int = 1 << 20) -> StoredState:
    holdings = tuple(Holding(*holder.split("/")) for holder in holders)
    return StoredState(bytes([key]), tokens, megabytes * 1_000_000, holdings)


def work(*states: StoredState) -> CombineWork:
    return CombineWork(states, len(states), 100)


def test_the_holder_of_most_bytes_combines() -> None:
    choice = choose_combine_worker(work(stored(1, "a", megabytes=10), stored(2, "b")), [view("a"), view("b")])
    assert choice is not None
    assert choice.worker_id == "b"
    (fetch,) = choice.fetches
    assert (fetch.key, fetch.holding) == (bytes([1]), Holding("a"))
    assert choice.fetch_seconds == pytest.approx(0.001 + 0.001)
    assert choice.combine_seconds == pytest.approx(COMBINE.seconds(2, 100))
    assert choice.first_token_seconds == pytest.approx(choice.fetch_seconds + choice.combine_seconds)


def test_a_busy_holder_is_passed_over_when_its_queue_outlasts_the_fetch() -> None:
    (fetching,) = (0.001 + 0.01,)
    for backlog, chosen in ((fetching - 0.005, "a"), (fetching + 0.005, "b")):
        choice = choose_combine_worker(work(stored(1, "a")), [view("a", backlog_seconds=backlog), view("b")])
        assert choice is not None
        assert choice.worker_id == chosen


def test_running_requests_count_by_what_they_add() -> None:
    slow = replace(COMBINE, running_seconds=0.002)
    busy, idle = (replace(each, speeds=replace(each.speeds, combine=slow)) for each in (view("a"), view("b")))
    busy = replace(busy, running_requests=8)
    held_by_busy = choose_combine_worker(work(stored(1, "a")), [busy, idle])
    assert held_by_busy is not None
    assert held_by_busy.worker_id == "b"
    without_price = choose_combine_worker(work(), [view("a", running_requests=1), view("b")])
    assert without_price is not None
    assert without_price.worker_id == "b"


def test_the_nearest_holder_and_its_tier_decide_the_way() -> None:
    near, far = view("near", host="one"), view("far", host="two")
    combine = view("combine", host="one")
    roles = frozenset({Role.PREFILL})
    workers = [replace(near, roles=roles), replace(far, roles=roles), combine]
    choice = choose_combine_worker(work(stored(1, "near", "far")), workers)
    assert choice is not None
    assert choice.fetches[0].holding.worker_id == "near"
    assert choice.fetch_seconds == pytest.approx(0.001 + 0.01)
    # From another host's memory at 1 GB/s, or from the near worker's disk at 2 GB/s and then across.
    choice = choose_combine_worker(work(stored(1, "near/disk", "far")), workers)
    assert choice is not None
    assert choice.fetch_seconds == pytest.approx(0.05 + 0.001 + 0.01)
    own = choose_combine_worker(work(stored(1, "combine/disk")), workers)
    assert own is not None
    assert own.fetch_seconds == pytest.approx(0.05)


def test_what_is_quicker_to_compute_is_computed() -> None:
    states = stored(1, "a", tokens=100), stored(2, "gone"), stored(3, "b")
    choice = choose_combine_worker(work(*states), [view("a", roles=frozenset({Role.PREFILL})), view("b")])
    assert choice is not None
    assert choice.computed == (bytes([1]), bytes([2]))
    assert choice.fetches == ()
    assert choice.combine_seconds == pytest.approx(COMBINE.seconds(1, 100 + 100 + (1 << 20)))


def test_draining_workers_and_mere_prefill_workers_combine_nothing_but_are_read_from() -> None:
    workers = [view("a", is_draining=True), view("b", roles=frozenset({Role.PREFILL})), view("c", backlog_seconds=9.0)]
    choice = choose_combine_worker(work(stored(1, "a")), workers)
    assert choice is not None
    assert choice.worker_id == "c"
    assert choice.fetches[0].holding == Holding("a")
    assert choose_combine_worker(work(), workers[:2]) is None


_names = st.sampled_from(["a", "b", "c", "d"])
_states = st.lists(
    st.builds(
        lambda holders, megabytes, tokens: stored(0, *holders, megabytes=megabytes, tokens=tokens),
        st.sets(_names, max_size=3),
        st.integers(1, 2000),
        st.integers(10, 10_000),
    ),
    max_size=4,
)


@given(_states, st.lists(st.floats(0, 1), min_size=4, max_size=4), st.integers(0, 1))
def test_no_other_worker_would_be_sooner(states: list[StoredState], backlogs: list[float], spread: int) -> None:
    """Against every worker, every way to get each state and computing it, by enumeration."""
    states = [replace(state, key=bytes([index])) for index, state in enumerate(states)]
    workers = [
        view(name, backlog_seconds=backlog, host=name if spread else "")
        for name, backlog in zip("abcd", backlogs, strict=True)
    ]
    request = work(*states)
    soonest = min(
        _first_token(request, combine, ways)
        for combine in workers
        for ways in itertools.product(*([None, *state.holdings] for state in states))
    )
    choice = choose_combine_worker(request, workers)
    assert choice is not None
    # Fetches run beside the backlog, so that computing a part is not always the slower way to the same end.
    assert soonest - 1e-9 <= choice.first_token_seconds
    alone = [replace(each, backlog_seconds=0.0) for each in workers]
    best = choose_combine_worker(request, alone)
    assert best is not None
    unhurried = min(
        _first_token(request, combine, ways)
        for combine in alone
        for ways in itertools.product(*([None, *state.holdings] for state in states))
    )
    saved = len(states) * COMBINE.segment_seconds
    assert best.first_token_seconds <= unhurried + saved + 1e-9
    assert choose_combine_worker(request, workers[::-1]) == choice


def _first_token(request: CombineWork, combine: WorkerView, ways: tuple[Holding | None, ...]) -> float:
    fetching, live = 0.0, request.live_tokens
    for state, way in zip(request.stored, ways, strict=True):
        if way is None:
            live += state.num_tokens
        elif way.worker_id != combine.worker_id:
            speeds = combine.speeds
            speed = speeds.same_host if not combine.host else speeds.other_host
            fetching += speed.seconds(state.num_bytes)
    composed = request.num_segments - ways.count(None)
    return max(combine.backlog_seconds, fetching) + COMBINE.seconds(composed, live)
