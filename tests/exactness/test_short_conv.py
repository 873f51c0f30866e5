"""The short convolution, every form, against an fp64 reference; tails are inputs before convolution and activation."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.ops.layout import PartWalk
from services.worker.ops.short_conv import chunked, naive
from tests.exactness.reference import convolve
from tests.exactness.rig import assert_close, assert_far

CHANNELS = 5
TOLERANCE = 1e-5


@pytest.fixture(params=[naive, chunked], ids=lambda form: form.__name__.rpartition(".")[2], scope="module")
def form(request: pytest.FixtureRequest) -> ModuleType:
    chosen: ModuleType = request.param
    return chosen


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=40)
@given(
    parts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=7),
    taps=st.integers(2, 5),
    seed=st.integers(0, 1000),
)
def test_runs_and_stored_tails(
    form: ModuleType, device: torch.device, parts: list[tuple[int, int]], taps: int, seed: int
) -> None:
    """Live runs continue their true history: of a body at least as long as the tail, or of the runs before them."""
    cuts = [(live, body if body >= taps - 1 else 0) for live, body in parts]
    rows = _draw(sum(map(sum, cuts)), CHANNELS, seed=seed)
    weight, tail = _draw(CHANNELS, taps, seed=seed + 1), _draw(taps - 1, CHANNELS, seed=seed + 2)
    live_rows: list[int] = []
    cu_runs, tails, offset = [0], [], 0
    for live, body in cuts:
        live_rows.extend(range(offset, offset + live))
        offset += live + body
        cu_runs.append(len(live_rows))
        tails.append(rows[offset - taps + 1 : offset].float().to(device) if body else None)
    walk = PartWalk(tuple(cu_runs), (0, len(cuts)))
    last = len(cuts) - 1
    packed = rows[live_rows].float().to(device)
    result = form.walk(packed, weight.float().to(device), walk, tail.float()[None].to(device), tails, (last,))
    assert_close(result.tails[0], torch.cat([tail, rows])[-(taps - 1) :], TOLERANCE)
    assert torch.equal(result.kept[last], result.tails[0])
    if live_rows:
        assert_close(result.outputs, convolve(rows, weight, tail)[live_rows], TOLERANCE)


def test_a_tail_off_by_one_is_seen(form: ModuleType, device: torch.device) -> None:
    rows, weight = _draw(20, CHANNELS, seed=1), _draw(CHANNELS, 4, seed=2)
    walk = PartWalk((0, 4), (0, 1))
    packed = rows[16:].float().to(device)
    expected = convolve(rows, weight, torch.zeros(3, CHANNELS, dtype=torch.float64))[16:]
    for start, judge in ((13, assert_close), (12, assert_far)):
        tail = rows[start : start + 3].float()[None].to(device)
        judge(form.walk(packed, weight.float().to(device), walk, tail, [None]).outputs, expected, TOLERANCE)


def test_step_equals_a_run_of_one(form: ModuleType, device: torch.device) -> None:
    """Requests in slots out of order; a slot that none of them has is left alone."""
    rows, weight, tails = _draw(3, CHANNELS, seed=1), _draw(CHANNELS, 4, seed=2), _draw(4, 3, CHANNELS, seed=3)
    running, slots = tails.float().to(device), torch.tensor([3, 0, 2], device=device)
    outputs = form.step(rows.float().to(device), weight.float().to(device), running, slots)
    for row, slot in enumerate(slots.tolist()):
        assert_close(outputs[row], convolve(rows[row : row + 1], weight, tails[slot])[0], TOLERANCE)
        assert_close(running[slot], torch.cat([tails[slot, 1:], rows[row : row + 1]]), TOLERANCE)
    assert torch.equal(running[1].cpu(), tails[1].float())


def test_requests_of_one_walk_are_apart(form: ModuleType, device: torch.device) -> None:
    rows, weight, tails = _draw(7, CHANNELS, seed=1), _draw(CHANNELS, 4, seed=2), _draw(2, 3, CHANNELS, seed=3)
    walk = PartWalk((0, 2, 7), (0, 1, 2))
    result = form.walk(rows.float().to(device), weight.float().to(device), walk, tails.float().to(device), [None, None])
    assert_close(result.outputs[:2], convolve(rows[:2], weight, tails[0]), TOLERANCE)
    assert_close(result.outputs[2:], convolve(rows[2:], weight, tails[1]), TOLERANCE)
    assert_far(result.outputs[2:], convolve(rows, weight, tails[0])[2:], TOLERANCE)
