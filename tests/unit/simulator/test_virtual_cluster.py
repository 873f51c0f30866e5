"""Virtual workers: times that can be worked out by hand, and what holds of every run."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.cache.domain.eviction import POLICIES
from services.cache.traces import TracePart, TraceRequest, TraceShape, draw_trace
from services.router.domain import schedule
from services.router.domain.assignment import Assignment, CapturePlan, ColdSegment
from services.router.domain.workers import WorkerView
from services.simulator.cluster import FanOut, Order, Run, Setting, simulate
from services.simulator.costs import CaptureCosts, CombineCosts, Costs, StateCosts, WayCosts
from services.simulator.report import jain_index, percentile, report
from services.simulator.residency import Residency
from services.simulator.ways import Window
from services.simulator.workload import read_arrivals

# A token takes a millisecond to capture, a pass 10; a combine 20, a segment 1, a live token 2. A state weighs a byte a token.
COSTS = Costs(
    name="by hand",
    source="",
    layers=10,
    workers_per_host=100,
    capture=CaptureCosts(((1.0, 0.011), (1000.0, 1.010)), 400, 400),
    combine=CombineCosts(0.020, 0.001, 0.002, 100),
    state=StateCosts(0, 1, 0, 0.0, 0, 1),
    same_host=WayCosts(0.0, 1e9),
    other_host=WayCosts(0.0, 1e9),
)
WHOLE = Setting(1, is_pipelined=False)


def request(time: float, *parts: tuple[str, int]) -> TraceRequest:
    return TraceRequest(time, "", (*(TracePart(name, tokens) for name, tokens in parts), TracePart("", 5)))


def run(trace: Sequence[TraceRequest], setting: Setting, costs: Costs = COSTS) -> Run:
    return simulate(read_arrivals(trace, costs, 1.0), costs, setting)


def times(trace: Sequence[TraceRequest], setting: Setting, costs: Costs = COSTS) -> list[float]:
    return [served.first_token_seconds for served in run(trace, setting, costs).served]


def test_a_prompt_without_segments_is_a_combine() -> None:
    assert times([request(0.0)], WHOLE) == [pytest.approx(0.020 + 5 * 0.002)]


def test_captures_share_passes_and_the_last_one_shares_the_combines() -> None:
    # 300 and 100 fill a pass of 400; 50 comes in a second one, with the combine's three segments and five live tokens.
    expected = (0.010 + 0.400) + (0.010 + 0.050) + 3 * 0.001 + 5 * 0.002
    assert times([request(0.0, ("a", 300), ("b", 100), ("c", 50))], WHOLE) == [pytest.approx(expected)]


def test_a_long_segment_runs_in_chunks() -> None:
    expected = (0.010 + 0.400) * 2 + (0.010 + 0.100) + 0.001 + 5 * 0.002
    assert times([request(0.0, ("a", 900))], WHOLE) == [pytest.approx(expected)]


def test_a_second_use_is_a_hit_and_a_repeat_is_composed_twice_but_captured_once() -> None:
    trace = [request(0.0, ("a", 300), ("a", 300)), request(1.0, ("a", 300))]
    done = run(trace, WHOLE)
    cold, hit = (served.first_token_seconds for served in done.served)
    assert cold == pytest.approx(0.310 + 2 * 0.001 + 5 * 0.002)
    assert hit == pytest.approx(0.020 + 0.001 + 5 * 0.002)
    assert (done.counts.captures, done.counts.cold_tokens, done.counts.hit_tokens) == (1, 300, 300)


def test_requests_at_once_for_the_same_document_capture_it_once() -> None:
    done = run([request(0.0, ("a", 300))] * 5, Setting(3))
    assert done.counts.captures == 1
    assert done.counts.pending_tokens == 4 * 300
    assert all(served.first_token_seconds >= 0.310 for served in done.served)


def test_whole_states_travel_one_after_the_other_and_the_combine_follows() -> None:
    slow = replace(COSTS, same_host=WayCosts(0.001, 10_000.0))
    # One each; the second's 300 bytes take 30 ms behind its capture, and the combine has a pass of its own.
    done = times([request(0.0, ("a", 350), ("b", 300))], Setting(2, is_pipelined=False), slow)
    assert done == [pytest.approx(0.360 + 0.020 + 2 * 0.001 + 5 * 0.002)]
    # Three at once into one worker: 100 bytes each, 10 ms each.
    trace = [request(0.0, ("a", 390), ("b", 390), ("c", 390), ("d", 390))]
    setting = Setting(4, Order.ROUND_ROBIN, is_pipelined=False)
    assert times(trace, setting, slow) == [pytest.approx(0.400 + 3 * 0.039 + 0.001 + 0.020 + 4 * 0.001 + 5 * 0.002)]


def test_layers_hide_transfers_behind_captures() -> None:
    slow = replace(COSTS, same_host=WayCosts(0.0, 10_000.0))
    trace = [request(0.0, ("a", 300), ("b", 300))]
    (streamed,) = times(trace, Setting(2, Order.ROUND_ROBIN), slow)
    (whole,) = times(trace, Setting(2, Order.ROUND_ROBIN, is_pipelined=False), slow)
    # The combine's rows stand in the sweep of the captures, which waits 3 ms for the other worker's first layer.
    assert streamed == pytest.approx(0.310 + 0.003 + 2 * 0.001 + 5 * 0.002)
    assert whole == pytest.approx(0.310 + 0.030 + 0.020 + 2 * 0.001 + 5 * 0.002)


def test_waiting_prompts_share_a_pass_up_to_the_tokens_of_a_sweep() -> None:
    trace = [request(0.0), *[request(0.001)] * 30]
    found = times(trace, WHOLE)
    assert found[0] == pytest.approx(0.030)
    # 20 of five tokens fit a sweep.
    first, second = 0.020 + 20 * 0.010, 0.020 + 10 * 0.010
    assert found[1:21] == [pytest.approx(0.029 + first)] * 20
    assert found[21:] == [pytest.approx(0.029 + first + second)] * 10


def test_prompts_go_ahead_of_captures_between_two_passes() -> None:
    trace = [request(0.0, ("a", 800)), request(0.1)]
    cold, short = times(trace, WHOLE)
    assert short == pytest.approx(0.410 - 0.1 + 0.030)
    assert cold == pytest.approx(0.410 + 0.030 + 0.410 + 0.001 + 5 * 0.002)


def test_other_hosts_are_reached_by_their_own_way() -> None:
    apart = replace(COSTS, workers_per_host=1, other_host=WayCosts(0.5, 1e9))
    trace = [request(0.0, ("a", 300), ("b", 300))]
    setting = Setting(2, Order.ROUND_ROBIN, is_pipelined=False)
    near, far = (times(trace, setting, costs)[0] for costs in (COSTS, apart))
    assert far - near == pytest.approx(0.5, abs=1e-6)
    # The router's scheduling keeps both captures where they are combined.
    assert times(trace, Setting(2, is_pipelined=False), apart)[0] < 0.7


_lengths = st.lists(st.integers(1, 900), min_size=1, max_size=6)
_settings = st.builds(
    Setting,
    st.integers(1, 6),
    st.sampled_from(Order),
    st.sampled_from(FanOut),
    st.booleans(),
    st.sampled_from(list(POLICIES.values())),
    st.none() | st.integers(1, 3000),
)
_traces = st.lists(st.tuples(st.floats(0, 1.5), st.lists(st.integers(0, 12), max_size=6)), min_size=1, max_size=12)


def drawn(chosen: list[tuple[float, list[int]]]) -> list[TraceRequest]:
    moments = sorted(time for time, _ in chosen)
    return [
        request(time - moments[0], *((str(name), 40 + 83 * name % 700) for name in names))
        for time, (_, names) in zip(moments, chosen, strict=True)
    ]


@settings(max_examples=150, deadline=None)
@given(_traces, _settings, st.sampled_from([1e9, 1e5, 3e3]))
def test_what_holds_of_every_run(
    chosen: list[tuple[float, list[int]]], setting: Setting, bytes_per_second: float
) -> None:
    costs = replace(COSTS, same_host=WayCosts(0.001, bytes_per_second))
    trace = drawn(chosen)
    done = run(trace, setting, costs)
    assert len(done.served) == len(trace)
    asked = [{part.id: part.num_tokens for part in one.parts if part.id} for one in trace]
    counts = done.counts
    tokens = counts.hit_tokens + counts.pending_tokens + counts.cold_tokens
    everything = sum(sum(one.values()) for one in asked)
    # What is quicker computed than fetched is in none of them.
    assert tokens <= everything
    if bytes_per_second == 1e9:
        assert tokens == everything
    for served, one in zip(done.served, trace, strict=True):
        composed = sum(bool(part.id) for part in one.parts)
        least = composed * costs.combine.segment_seconds + 5 * costs.combine.token_seconds
        assert served.first_token_seconds >= least - 1e-9
    distinct = {name: length for one in asked for name, length in one.items()}
    if setting.room_bytes is None:
        assert (counts.captures, counts.cold_tokens) == (len(distinct), sum(distinct.values()))
        assert counts.evictions == 0
    # A device runs one sweep at a time, and all work is done.
    assert all(seconds <= done.end + 1e-9 for seconds in done.busy_seconds)
    assert sum(done.busy_seconds) >= counts.cold_tokens * 0.001
    assert done.end >= max(served.time + served.first_token_seconds for served in done.served) - 1e-9
    again = run(trace, setting, costs)
    assert again == done


@settings(max_examples=100, deadline=None)
@given(_lengths, st.integers(1, 6), st.sampled_from([1e9, 1e5, 3e3]))
def test_layers_never_come_later_than_whole_states(
    lengths: list[int], num_workers: int, bytes_per_second: float
) -> None:
    costs = replace(COSTS, same_host=WayCosts(0.001, bytes_per_second))
    trace = [request(0.0, *((str(index), length) for index, length in enumerate(lengths)))]
    streamed, whole = (
        times(trace, Setting(num_workers, Order.ROUND_ROBIN, is_pipelined=flag), costs)[0] for flag in (True, False)
    )
    assert streamed <= whole + 1e-9


@settings(max_examples=100, deadline=None)
@given(_lengths, st.integers(1, 6))
def test_a_cold_request_takes_no_less_than_its_longest_capture_and_than_its_share(
    lengths: list[int], num_workers: int
) -> None:
    trace = [request(0.0, *((str(index), length) for index, length in enumerate(lengths)))]
    (found,) = times(trace, Setting(num_workers))
    assert found >= COSTS.capture_seconds(max(lengths)) + 0.001 / COSTS.layers
    assert found >= 0.001 * sum(lengths) / num_workers


def test_it_is_the_routers_scheduling_that_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another assignment in the router's module, the simulation is another one."""
    trace = [request(0.0, *((str(index), 400) for index in range(4)))]
    (spread,) = times(trace, Setting(4))

    def all_on_the_last(
        segments: Iterable[ColdSegment], workers: Sequence[WorkerView], combine: WorkerView, waiting: Sequence[int]
    ) -> CapturePlan:
        return CapturePlan(tuple(Assignment(one, workers[-1].worker_id, 0.0, 0.0, 0.0) for one in segments))

    monkeypatch.setattr(schedule, "assign_captures", all_on_the_last)
    (stacked,) = times(trace, Setting(4))
    assert stacked > 3 * spread


def test_rooms_that_do_not_add_up_are_found() -> None:
    residency = Residency(["a", "b"], POLICIES["lru"], None)
    residency.put("a", ColdSegment(b"x", 10, 100), Window(0.0, 0.0), 0.0)
    residency.check_integrity()
    residency.rooms["a"].used_bytes += 1
    with pytest.raises(AssertionError, match="counts 101 bytes"):
        residency.check_integrity()
    residency.rooms["a"].used_bytes -= 1
    del residency.rooms["a"].held[b"x"]
    residency.rooms["a"].used_bytes = 0
    with pytest.raises(AssertionError, match="holders"):
        residency.check_integrity()


def burst(seed: int) -> list[TraceRequest]:
    """Large requests among small ones, closer together than they can be served."""
    source = random.Random(seed)
    counts = [12 if source.random() < 0.2 else source.randint(1, 2) for _ in range(60)]
    return [
        request(0.15 * number, *((f"{number}-{index}", source.randint(100, 400)) for index in range(count)))
        for number, count in enumerate(counts)
    ]


def test_with_shares_most_requests_wait_less_for_large_ones() -> None:
    found = {
        fan_out: [report(run(burst(seed), setting), setting) for seed in range(8)]
        for fan_out in FanOut
        for setting in [Setting(6, fan_out=fan_out)]
    }
    slowdowns = {fan_out: [one.mean_slowdown for one in reports] for fan_out, reports in found.items()}
    medians = {fan_out: [one.p50_seconds for one in reports] for fan_out, reports in found.items()}
    assert sum(slowdowns[FanOut.SHARED]) < 0.9 * sum(slowdowns[FanOut.ALL])
    assert sum(medians[FanOut.SHARED]) < 0.9 * sum(medians[FanOut.ALL])


def test_longest_first_is_sooner_than_in_turn_when_one_request_has_all_workers() -> None:
    ratios = []
    for seed in range(20):
        source = random.Random(seed)
        trace = [request(0.0, *((str(index), source.randint(20, 400)) for index in range(12)))]
        ordered, in_turn = (times(trace, Setting(4, order))[0] for order in Order)
        ratios.append(in_turn / ordered)
    assert min(ratios) > 0.95
    assert sum(ratios) / len(ratios) > 1.1


def test_a_small_room_evicts_and_hits_less() -> None:
    trace = draw_trace(TraceShape(requests=400, documents=60, median_tokens=100, longest_tokens=400, rate=2.0), seed=1)
    costs = replace(COSTS, state=replace(COSTS.state, segment_bytes=100))
    free = run(trace, Setting(2), costs)
    tight = {name: run(trace, Setting(2, policy=policy, room_bytes=3000), costs) for name, policy in POLICIES.items()}
    for done in tight.values():
        assert done.counts.evictions > 100
        assert done.counts.hit_tokens < free.counts.hit_tokens
        assert done.counts.captures > free.counts.captures
    assert len({done.counts.hit_tokens for done in tight.values()}) == len(POLICIES)


def test_tenants_share_nothing_and_short_segments_are_live() -> None:
    parts = (TracePart("a", 300), TracePart("b", 3), TracePart("", 5))
    trace = [TraceRequest(0.0, "one", parts), TraceRequest(1.0, "two", parts)]
    costs = replace(COSTS, state=replace(COSTS.state, min_tokens=10, seam_window=4, seam_window_max=4))
    first, second = read_arrivals(trace, costs, 2.0)
    assert (first.num_composed, first.live_tokens, first.segments[0].num_bytes) == (1, 4 + 3 + 5, 296)
    assert second.time == 0.5
    assert run(trace, WHOLE, costs).counts.captures == 2


def test_a_trace_gives_the_bytes_of_a_state_where_it_knows_them() -> None:
    (arrival,) = read_arrivals([TraceRequest(0.0, "", (TracePart("a", 300, 77),))], COSTS, 1.0)
    assert arrival.segments[0].num_bytes == 77
    assert arrival.live_tokens == 1


def test_figures_of_a_run() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert jain_index([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain_index([1e9, 1e-9, 1e-9, 1e-9]) == pytest.approx(0.25)
    setting = Setting(2, is_pipelined=False)
    found = report(run([request(0.0), request(1.0)], setting), setting)
    assert found.requests == 2
    assert found.makespan_seconds == pytest.approx(1.030)
    assert [found.mean_seconds, found.p50_seconds, found.p99_seconds] == [pytest.approx(0.030)] * 3
    assert found.utilisation == pytest.approx(0.060 / 1.030 / 2)
    assert found.least_utilisation == 0.0
    assert found.most_utilisation == pytest.approx(0.060 / 1.030)
    assert found.max_slowdown == pytest.approx(1.0)
    assert found.fairness == pytest.approx(1.0)
