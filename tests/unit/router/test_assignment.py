"""Captures on workers: longest first against exhaustion, and what no assignment may do."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cluster.instances import Instance, Loads, equal, round_robin, transferred, unequal, worker_view
from bench.cluster.policy import Compared, compare, longest_first
from services.router.domain.assignment import ColdSegment, assign_captures, distinct, fan_out
from services.router.domain.workers import Role, TransferSpeed


def ignoring_speeds(instance: Instance) -> Loads:
    """As if every worker were the first one and free."""
    first = instance.workers[0]
    alike = tuple(replace(first, worker_id=view.worker_id, backlog_seconds=0.0) for view in instance.workers)
    return longest_first(replace(instance, workers=alike))


def shortest_first(instance: Instance) -> Loads:
    """List scheduling in the wrong order."""
    loads: dict[str, list[ColdSegment]] = {view.worker_id: [] for view in instance.workers}
    for segment in sorted(instance.segments, key=lambda one: one.num_tokens):
        least = min(loads, key=lambda name: sum(one.num_tokens for one in loads[name]))
        loads[least].append(segment)
    return loads


@pytest.fixture(scope="module")
def equal_workers() -> Compared:
    return compare(400, equal)


@pytest.fixture(scope="module")
def hardest() -> Compared:
    """Ten segments on four equal workers."""
    return compare(60, equal, segments=(10, 10), workers=(4, 4))


@pytest.fixture(scope="module")
def unequal_workers() -> Compared:
    return compare(200, unequal)


@pytest.fixture(scope="module")
def with_transfers() -> Compared:
    return compare(100, transferred, segments=(1, 7))


def test_equal_workers_are_within_three_hundredths_of_the_optimum(equal_workers: Compared, hardest: Compared) -> None:
    for compared in (equal_workers, hardest):
        ratios = compared.ratios(longest_first)
        assert mean(ratios) <= 1.03
        assert min(ratios) >= 1 - 1e-9
        assert compared.over_bound(longest_first) <= 1 + 1e-9
        assert mean(ratios) < mean(compared.ratios(round_robin))


def test_unequal_and_busy_workers_are_near_the_optimum(unequal_workers: Compared) -> None:
    ratios = unequal_workers.ratios(longest_first)
    assert mean(ratios) <= 1.03
    assert max(ratios) <= 1.25
    assert mean(ratios) < mean(unequal_workers.ratios(round_robin))


def test_states_that_must_travel_stay_near_the_optimum(with_transfers: Compared) -> None:
    ratios = with_transfers.ratios(longest_first)
    assert mean(ratios) <= 1.06
    assert mean(ratios) < mean(with_transfers.ratios(round_robin))


def test_the_oracle_catches_assignments_that_look_at_too_little(
    equal_workers: Compared, hardest: Compared, unequal_workers: Compared, with_transfers: Compared
) -> None:
    """Negative controls of the three tests above."""
    assert mean(unequal_workers.ratios(ignoring_speeds)) > 1.1
    assert mean(hardest.ratios(shortest_first)) > 1.03
    assert equal_workers.over_bound(shortest_first) > 1
    blind = [
        replace(one, segments=tuple(replace(s, num_bytes=0) for s in one.segments)) for one in with_transfers.instances
    ]
    loads = {id(one): longest_first(no_bytes) for one, no_bytes in zip(with_transfers.instances, blind, strict=True)}

    def ignoring_bytes(instance: Instance) -> Loads:
        weights = {segment.key: segment for segment in instance.segments}
        return {name: [weights[one.key] for one in load] for name, load in loads[id(instance)].items()}

    assert mean(with_transfers.ratios(ignoring_bytes)) > 1.2


_lengths = st.lists(st.integers(1, 9000), max_size=12)
_speeds = st.lists(st.tuples(st.floats(1e-6, 1e-3), st.floats(0, 0.1), st.floats(0, 1)), min_size=1, max_size=6)


def cold(lengths: Sequence[int]) -> tuple[ColdSegment, ...]:
    return tuple(ColdSegment(bytes([index]), length, 1000 * length) for index, length in enumerate(lengths))


_waiting = st.lists(st.integers(0, 20), max_size=10)


@given(_lengths, _speeds, _waiting)
def test_every_segment_is_captured_once_by_few_enough_workers(
    lengths: list[int], speeds: list[tuple[float, float, float]], waiting: list[int]
) -> None:
    workers = [
        replace(worker_view(f"w{index}", token, of_pass), backlog_seconds=backlog)
        for index, (token, of_pass, backlog) in enumerate(speeds)
    ]
    segments = cold(lengths)
    plan = assign_captures([*segments, *segments], workers, workers[0], waiting)
    assert sorted(each.segment.key for each in plan.assignments) == sorted(one.key for one in segments)
    assert len({each.worker_id for each in plan.assignments}) <= fan_out(len(workers), len(segments), waiting)
    for view in workers:
        own = plan.of_worker(view.worker_id)
        lengths_in_order = [each.segment.num_tokens for each in own]
        assert lengths_in_order == sorted(lengths_in_order, reverse=True)
        for before, each in itertools.pairwise(own):
            assert each.start_seconds == before.finish_seconds
        for each in own:
            assert view.backlog_seconds <= each.start_seconds < each.finish_seconds <= each.arrival_seconds
    # Neither the order of segments nor that of workers decides.
    assert assign_captures(segments[::-1], workers[::-1], workers[0], waiting) == plan


def test_workers_that_combine_only_or_drain_capture_nothing() -> None:
    combines = replace(worker_view("a", 1e-5), roles=frozenset({Role.COMBINE}))
    drains = replace(worker_view("b", 1e-6), is_draining=True)
    prefills = replace(worker_view("c", 1e-3), roles=frozenset({Role.PREFILL}))
    plan = assign_captures(cold([100, 200]), [combines, drains, prefills], combines)
    assert {each.worker_id for each in plan.assignments} == {"c"}
    assert assign_captures(cold([100]), [combines, drains], combines).assignments == ()


def test_a_busy_worker_gets_the_short_segments() -> None:
    free, busy = worker_view("free", 1e-5), replace(worker_view("busy", 1e-5), backlog_seconds=0.05)
    plan = assign_captures(cold([4000, 3000, 1000]), [free, busy], free)
    assert [each.segment.num_tokens for each in plan.of_worker("busy")] == [1000]


def test_states_that_travel_slower_than_they_are_computed_are_captured_where_they_are_combined() -> None:
    slow = TransferSpeed(0.0, 1000 / 1e-3)
    combine, other = (
        replace(view, speeds=replace(view.speeds, same_host=slow))
        for view in (worker_view("a", 1e-5), worker_view("b", 1e-5))
    )
    plan = assign_captures(cold([1000] * 4), [combine, other], combine)
    assert len(plan.of_worker("a")) == 4
    elsewhere = replace(other, host="far")
    assert len(assign_captures(cold([1000] * 4), [combine, elsewhere], combine).of_worker("far")) == 0
    assert len(assign_captures(cold([1000] * 4), [combine, elsewhere], combine).of_worker("b")) == 2


def test_a_state_in_pieces_arrives_soon_after_its_last_layer() -> None:
    whole, pieces = TransferSpeed(0.0, 1e6), TransferSpeed(0.0, 1e6, num_pieces=10)
    assert whole.arrival(1.0, 2.0, 500_000) == pytest.approx(2.5)
    assert pieces.arrival(1.0, 2.0, 500_000) == pytest.approx(2.05)
    # A way slower than the capture is busy from the first piece on.
    assert pieces.arrival(1.0, 2.0, 5_000_000) == pytest.approx(1.1 + 5.0)


def max_min_share(num_workers: int, num_segments: int, waiting: Sequence[int]) -> int:
    """Everybody's share is raised together, until it is what they wish or nothing is left."""
    wishes = [Fraction(num_segments), *(Fraction(max(wish, 1)) for wish in waiting)]
    shares = [Fraction(0) for _ in wishes]
    left = Fraction(num_workers)
    while left > 0 and (growing := [i for i, wish in enumerate(wishes) if shares[i] < wish]):
        step = min(left / len(growing), *(wishes[i] - shares[i] for i in growing))
        for i in growing:
            shares[i] += step
        left -= step * len(growing)
    return math.ceil(shares[0])


@given(st.integers(1, 64), st.integers(1, 40), _waiting)
def test_fan_out_is_the_max_min_share(num_workers: int, num_segments: int, waiting: list[int]) -> None:
    share = fan_out(num_workers, num_segments, waiting)
    assert share == max_min_share(num_workers, num_segments, waiting)
    assert 1 <= share <= min(num_workers, num_segments)
    assert fan_out(num_workers, num_segments, [*waiting, 3]) <= share
    assert fan_out(num_workers, num_segments) == min(num_workers, num_segments)


def test_what_others_cannot_use_is_free() -> None:
    assert fan_out(8, 32, [1, 1]) == 6
    assert fan_out(8, 32, [32, 32]) == 3
    assert fan_out(8, 1, [32] * 20) == 1


def test_a_segment_that_stands_twice_is_one_capture() -> None:
    one, two = cold([10, 20])
    assert distinct([one, two, one]) == [one, two]
