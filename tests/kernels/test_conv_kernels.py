"""The convolution's kernels against its naive form: runs shorter than the history, empty ones, stored and kept tails."""

import pytest
import torch

from services.worker.ops.layout import BodyAddresses, PartWalk, WalkRoom
from services.worker.ops.short_conv import naive
from services.worker.ops.short_conv import triton as kernels
from tests.exactness.rig import assert_close, assert_far

TOLERANCE = 1e-6
# Two requests: runs of 1, 0, 37 and 2 tokens, then of 3; bodies behind the second and the last part.
WALK = PartWalk((0, 1, 1, 38, 40, 43), (0, 4, 5))
BODIES = (1, 4)
KEPT = (0, 2, 4)


def _draw(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize(("channels", "taps"), [(7, 4), (300, 4), (5, 2)])
def test_walk(channels: int, taps: int, device: torch.device) -> None:
    """Rows are a view of wider ones, as a projection leaves them."""
    inputs = _draw(WALK.num_tokens, channels + 3, seed=1, device=device)[:, 2 : channels + 2]
    weight, tails = _draw(channels, taps, seed=2, device=device), _draw(2, taps - 1, channels, seed=3, device=device)
    bodies = [
        _draw(taps - 1, channels, seed=10 + part, device=device) if part in BODIES else None
        for part in range(WALK.num_parts)
    ]
    expected = naive.walk(inputs, weight, WALK, tails, bodies, KEPT)
    for _ in range(2):
        actual = kernels.walk(inputs, weight, WALK, tails, bodies, KEPT)
        assert_close(actual.outputs, expected.outputs, TOLERANCE)
        assert torch.equal(actual.tails, expected.tails)
        assert actual.kept.keys() == expected.kept.keys()
        assert all(torch.equal(actual.kept[part], tail) for part, tail in expected.kept.items())
    forgotten = kernels.walk(inputs, weight, WALK, tails, [None] * WALK.num_parts, KEPT)
    swapped = kernels.walk(inputs, weight, WALK, tails.flip(0), bodies, KEPT)
    mirrored = kernels.walk(inputs, weight.flip(1), WALK, tails, bodies, KEPT)
    for wrong in (forgotten, swapped, mirrored):
        assert_far(wrong.outputs, expected.outputs, TOLERANCE)


@pytest.mark.parametrize("taps", [4, 2])
def test_a_recorded_walk_takes_over_others(taps: int, device: torch.device) -> None:
    """What recorded combines replay: rows in tensors that stay, with room for tokens; stored tails where they lie."""
    channels, room = 7, WalkRoom(tokens=64, parts=8, chunks=8, requests=2, kept=1, chunk_tokens=64)
    fixed, recorded = kernels.FixedRows(taps - 1, room, device), PartWalk((0, 64), (0, 1, 2))
    fixed.prepare(recorded)
    weight, tails = _draw(channels, taps, seed=2, device=device), _draw(2, taps - 1, channels, seed=3, device=device)
    inputs, stored = _draw(64, channels, seed=1, device=device), _draw(5, taps - 1, channels, seed=4, device=device)
    for walk, places, kept in ((WALK, (1, 4), 2), (PartWalk((0, 5, 6, 60), (0, 2, 3)), (0, 1), 0)):
        bodies = [stored[part] if part in places else None for part in range(walk.num_parts)]
        expected = naive.walk(inputs[: walk.num_tokens], weight, walk, tails, bodies, (kept,))
        fixed.refill(walk, [body is not None for body in bodies], [kept])
        table = torch.tensor([[0] * 2] * 2 + [[stored[part].data_ptr() for part in places]], device=device)
        actual = kernels.walk(inputs, weight, recorded, tails, (), (0,), BodyAddresses(table, is_aligned=False))
        assert_close(actual.outputs[: walk.num_tokens], expected.outputs, TOLERANCE)
        assert torch.equal(actual.tails, expected.tails)
        assert torch.equal(actual.kept[0], expected.kept[kept])
        other = kernels.walk(inputs, weight, recorded, tails, (), (0,), BodyAddresses(table.flip(1), is_aligned=False))
        assert_far(other.outputs[: walk.num_tokens], expected.outputs, TOLERANCE)


def test_bodies_without_live_tokens(device: torch.device) -> None:
    inputs, weight, tail = (_draw(*shape, seed=1, device=device) for shape in ((0, 7), (7, 4), (3, 7)))
    result = kernels.walk(inputs, weight, PartWalk((0, 0), (0, 1)), torch.zeros_like(tail)[None], [tail])
    assert torch.equal(result.tails[0], tail)
    assert result.outputs.shape == (0, 7)


@pytest.mark.parametrize(("channels", "taps"), [(7, 4), (600, 4), (5, 2)])
def test_step(channels: int, taps: int, device: torch.device) -> None:
    """Slots that no request has keep their bytes."""
    inputs = _draw(3, channels + 3, seed=1, device=device)[:, 2 : channels + 2]
    weight, tails = _draw(channels, taps, seed=2, device=device), _draw(5, taps - 1, channels, seed=3, device=device)
    slots, running, running_naive = torch.tensor([4, 0, 2], device=device), tails.clone(), tails.clone()
    expected = naive.step(inputs, weight, running_naive, slots)
    assert_close(kernels.step(inputs, weight, running, slots), expected, TOLERANCE)
    assert torch.equal(running, running_naive)
    assert not torch.equal(running, tails)
    assert_far(kernels.step(inputs, weight, tails.clone(), slots.flip(0)), expected, TOLERANCE)
