"""End states of stored bodies turned to their positions in one launch, against the rotation of one state after the other."""

from dataclasses import replace

import pytest
import torch

from services.worker.ops.layout import BodyAddresses
from services.worker.ops.recurrence import dispatch
from services.worker.ops.rotary import Rotary
from tests.exactness.rig import assert_close, assert_far

TOLERANCE = 1e-5
POSITIONS = (3, 1200, 40)


def _addresses(states: list[torch.Tensor], device: torch.device) -> BodyAddresses:
    """Room for one body more than there are; transitions are nowhere."""
    rows = [[7, 8, 9, 0], [state.data_ptr() for state in states] + [0], [0] * 4]
    positions = torch.tensor([*POSITIONS, 5], device=device)
    return BodyAddresses(torch.tensor(rows, device=device), is_aligned=False, positions=positions)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(3, 12, 40, 8), (2, 16, 16, 16), (1, 9, 5, 2)], ids=str)
def test_every_body_stands_where_it_is_used(
    shape: tuple[int, int, int, int], interleaved: bool, device: torch.device
) -> None:
    """Heads, key and value channels, and how many of the keys' turn; the room turns into zeros."""
    *size, rotary_dim = shape
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(size, generator=generator).to(device) for _ in POSITIONS]
    rotary = Rotary.create(1e4, rotary_dim, device, interleaved)
    exact = replace(rotary, frequencies=rotary.frequencies.double())
    addresses = _addresses(states, device)
    turned = dispatch.turn_bodies(addresses, rotary, torch.empty(2, *size, device=device))
    assert turned.turned is not None
    assert turned.table[0].tolist() == [7, 8, 9, 0]
    assert turned.table[1].tolist() == [state.data_ptr() for state in turned.turned]
    for state, place, actual in zip(states, POSITIONS, turned.turned, strict=False):
        assert_close(actual, exact.rotate_state(state.double(), place), TOLERANCE)
        assert_far(actual, exact.rotate_state(state.double(), place + 1), TOLERANCE)
        other = replace(exact, interleaved=not interleaved).rotate_state(state.double(), place)
        # One pair turns alike either way.
        assert_far(actual, other, TOLERANCE) if rotary_dim > 2 else assert_close(actual, other, TOLERANCE)
    assert not turned.turned[-1].any()


def test_far_positions_turn_exactly(device: torch.device) -> None:
    """A million tokens from the start, where an angle in fp32 is off by a twentieth of a radian."""
    state, rotary = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(2)), Rotary.create(1e4, 16, device)
    on_device = state.to(device)
    table = torch.tensor([[0], [on_device.data_ptr()], [0]], device=device)
    addresses = BodyAddresses(table, is_aligned=False, positions=torch.tensor([1_000_003], device=device))
    turned = dispatch.turn_bodies(addresses, rotary, torch.empty(1, 1, 16, 16, device=device)).turned
    assert turned is not None
    exact = Rotary(rotary.frequencies.cpu().double(), rotary.label)
    assert_close(turned[0], exact.rotate_state(state.double(), 1_000_003), TOLERANCE)


def test_bodies_without_positions_are_refused(device: torch.device) -> None:
    addresses = replace(_addresses([torch.zeros(1, 4, 4, device=device)] * 3, device), positions=None)
    with pytest.raises(ValueError, match="lack their positions"):
        dispatch.turn_bodies(addresses, Rotary.create(1e4, 4, device), torch.empty(1, 1, 4, 4, device=device))
