"""The benchmark of clusters: what its scheduling reaches, and that costs of a machine can be measured."""

from pathlib import Path

from bench.cluster.costs_file import write_costs
from bench.cluster.fetches import measure_fetches
from bench.cluster.policy import measure_policy
from bench.cluster.simulated import measure_fairness, measure_simulated
from bench.cluster.transfers import measure_transfers
from bench.cluster.worker_costs import Sizes, measure_costs
from bench.results import Row
from services.simulator.costs import WayCosts, read_costs

DEMO = Path("models/demo")


def reached(rows: list[Row]) -> list[Row]:
    """Rows with a reach, all of which hold it."""
    aimed = [row for row in rows if row.reach is not None]
    for row in aimed:
        assert row.reach is not None
        better = row.value >= row.reach if row.better == "higher" else row.value <= row.reach + 1e-9
        assert better, row
    return aimed


def test_longest_first_reaches_what_is_asked_of_it() -> None:
    rows = list(measure_policy(scale=20))
    assert len(reached(rows)) == 4
    means = {row.measure: row.value for row in rows if "mean" in row.measure}
    for measure, value in means.items():
        if measure.startswith("longest first"):
            assert 1 <= value < means[measure.replace("longest first", "round robin")]


def test_simulated_first_tokens_reach_what_is_asked_of_them() -> None:
    rows = list(measure_simulated())
    assert len(reached(rows)) == 2
    assert len({row.measure for row in rows}) == len(rows)


def test_fairness_is_told_with_and_without_shares() -> None:
    rows = list(measure_fairness(num_requests=100))
    assert len(rows) == 12
    assert all(0 < row.value <= 1 for row in rows if row.measure.startswith("Jain"))


def test_costs_of_this_machine_are_measured(tmp_path: Path) -> None:
    sizes = Sizes(passes=(64, 128), segments=(1, 2), questions=(8, 16), segment_tokens=96, rounds=1)
    costs = measure_costs(DEMO, sizes, WayCosts(0.001, 1e9), "a test")
    assert costs.layers == 8
    assert costs.capture.curve.seconds(128) >= costs.capture.curve.seconds(64) > 0
    assert costs.combine_seconds(2, 100) > 0
    assert costs.state.size_bytes(500) > costs.state.size_bytes(100) > 0
    path = tmp_path / "costs.toml"
    write_costs(path, costs)
    assert read_costs(path).state == costs.state


def test_the_way_between_processes_is_measured() -> None:
    way = measure_fetches(DEMO, segment_tokens=256, rounds=1)
    assert 0 < way.latency_seconds < 30
    assert way.bytes_per_second > 0


def test_both_ways_between_two_processes_are_measured() -> None:
    rows = measure_transfers(DEMO, num_layers=3, layer_bytes=1 << 16, rounds=1)
    assert [row.unit for row in rows] == ["GB/s", "ms", "GB/s", "ms", "×"]
    assert all(row.value > 0 for row in rows)
