"""Files of costs: what they say, what they refuse, and that the shipped ones are what was measured."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cluster.costs_file import costs_text
from bench.cluster.h200 import derive_costs, foretold
from bench.cluster.simulated import H200
from bench.results import read_results
from services.simulator.costs import SHIPPED, Curve, read_costs, shipped_names
from services.simulator.errors import CostsError

GPU_RESULTS = Path("bench/results/gpu.json")


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_file_is_whole_and_says_where_it_comes_from(name: str, tmp_path: Path) -> None:
    path = SHIPPED / f"{name}.toml"
    costs = read_costs(path)
    assert costs.source
    copy = tmp_path / "copy.toml"
    copy.write_text(costs_text(costs))
    assert read_costs(copy) == costs


def test_the_shipped_costs_of_the_card_are_those_of_the_measured_figures() -> None:
    shipped = read_costs(H200)
    derived = derive_costs(read_results(GPU_RESULTS), shipped.other_host)
    assert costs_text(derived) == H200.read_text(), "run `python -m bench.cluster h200`"


def test_the_costs_foretell_figures_that_they_were_not_made_from() -> None:
    results = read_results(GPU_RESULTS)
    found = {each.name: each.by_costs / each.measured for each in foretold(results, read_costs(H200))}
    assert len(found) == 4
    # Prompts that wait together share more of a pass on the card than the costs of one alone say.
    assert all(0.7 < ratio < 1.6 for ratio in found.values())


def test_a_pass_costs_what_was_measured_and_lines_between() -> None:
    curve = Curve(((100.0, 1.0), (200.0, 2.0), (400.0, 3.0)))
    wanted = {0: 0.0, 1: 1.0, 100: 1.0, 150: 1.5, 200: 2.0, 300: 2.5, 400: 3.0, 600: 4.0}
    assert {tokens: curve.seconds(tokens) for tokens in wanted} == wanted


@given(st.floats(0, 1), st.floats(1e-6, 1e-2))
def test_a_line_finds_pass_and_token_of_costs_that_are_one(of_pass: float, of_token: float) -> None:
    curve = Curve(tuple((tokens, of_pass + of_token * tokens) for tokens in (64.0, 512.0, 4096.0, 32768.0)))
    assert list(curve.line(4096)) == [pytest.approx(of_pass, abs=1e-9), pytest.approx(of_token)]


def test_a_line_of_costs_that_bend_is_never_below_nothing() -> None:
    of_pass, of_token = Curve(((100.0, 0.01), (1000.0, 1.0), (2000.0, 9.0))).line(2000)
    assert of_pass >= 0
    assert of_token > 0


def test_chunks_and_seams_count() -> None:
    costs = read_costs(H200)
    chunk = costs.capture.chunk_tokens
    curve = costs.capture.curve
    assert costs.capture_seconds(chunk + 1000) == curve.seconds(chunk) + curve.seconds(1000)
    assert costs.capture_seconds(2 * chunk) == 2 * curve.seconds(chunk)
    state = read_costs(SHIPPED / "cpu-demo.toml").state
    assert [state.seam(tokens) for tokens in (100, 400, 5000)] == [32, 50, 128]
    assert state.size_bytes(400) == state.segment_bytes + 350 * state.token_bytes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers = 40", "", "layers is missing"),
        ("layers = 40", "layers = 0", "layers is 0; it must be at least 1"),
        ("layers = 40", "layers = 40\nlayer = 1", "layer is unknown"),
        ("pass_tokens = 4096", "pass_tokens = 4096.5", "capture.pass_tokens is 4096.5; it must be a int"),
        ("seam_share = 0.0", "seam_share = -1.0", "state.seam_share is -1.0; it must be positive"),
        ("bytes_per_second = 55400000000.0", "bytes_per_second = 0", "same_host.bytes_per_second is 0"),
        ("bytes_per_second = 55400000000.0", "bytes_per_second = inf", "same_host.bytes_per_second is inf"),
        ("[state]", "[states]", "states is unknown"),
        ("[[512,", "[[0,", "capture.points must be at least two pairs"),
        ("[[512,", "[[5000,", "capture.points must rise"),
        ("layers = 40", "layers = ", "is no TOML"),
    ],
)
def test_a_faulty_file_is_named_with_its_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = H200.read_text()
    assert old in text
    path = tmp_path / "costs.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(CostsError, match=message) as refusal:
        read_costs(path)
    assert str(path) in str(refusal.value)


def test_a_file_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(CostsError, match=r"nowhere.toml: No such file.*cpu-demo, h200"):
        read_costs(Path("nowhere.toml"))


def test_single_numbers_may_be_changed() -> None:
    changed = read_costs(H200, ["capture.pass_tokens=8192", "same_host.bytes_per_second=1e9", "workers_per_host=2"])
    assert (changed.capture.pass_tokens, changed.same_host.bytes_per_second, changed.workers_per_host) == (8192, 1e9, 2)
    for change in ("capture.pass_tokens=many", "capture.speed=1", "capture.points=1", "capture", "name=x", "layers=0"):
        with pytest.raises(CostsError, match=change.split("=")[0]):
            read_costs(H200, [change])


def test_shipped_files_are_plain_toml() -> None:
    for name in shipped_names():
        assert tomllib.loads((SHIPPED / f"{name}.toml").read_text())["name"]
