"""The output gate's kernel against its naive form: heads inside wider rows, widths that fill no tile, half precision."""

import pytest
import torch

from services.worker.ops import gate
from services.worker.ops.gate import naive
from services.worker.ops.gate import triton as kernels
from tests.exactness.rig import assert_close, assert_far

TOLERANCE = 1e-6


def _draw(shape: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads, and gates that stand behind the queries of each head in one projection."""
    generator = torch.Generator().manual_seed(3)
    mixed = torch.randn(shape, generator=generator).to(device)
    projected = torch.randn(*shape[:2], 2 * shape[2], generator=generator).to(device)
    return mixed, projected[..., shape[2] :]


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 20), (70, 6, 37), (2, 2, 2500)], ids=str)
def test_equals_the_naive_form(shape: tuple[int, int, int], device: torch.device) -> None:
    mixed, gates = _draw(shape, device)
    expected = naive.sigmoid_gate(mixed, gates)
    assert_close(kernels.sigmoid_gate(mixed, gates), expected, TOLERANCE)
    assert_far(kernels.sigmoid_gate(mixed, 1.01 * gates), expected, TOLERANCE)
    if shape[0] > 1:
        assert_far(kernels.sigmoid_gate(mixed, gates.roll(1, 0)), expected, TOLERANCE)
        assert_far(kernels.sigmoid_gate(mixed, gates.roll(1, 1)), expected, TOLERANCE)


def test_heads_that_are_not_contiguous(device: torch.device) -> None:
    mixed, gates = _draw((6, 4, 10), device)
    swapped = mixed.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(kernels.sigmoid_gate(swapped, gates), kernels.sigmoid_gate(mixed, gates))
    channels_apart = mixed.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(kernels.sigmoid_gate(channels_apart, gates), kernels.sigmoid_gate(mixed, gates))


def test_half_precision_is_rounded_once(device: torch.device) -> None:
    mixed, gates = (heads.half() for heads in _draw((9, 2, 30), device))
    actual = kernels.sigmoid_gate(mixed, gates)
    assert actual.dtype == torch.float16
    assert_close(actual, naive.sigmoid_gate(mixed.float(), gates.float()).half(), TOLERANCE)


def test_shapes_must_agree(device: torch.device) -> None:
    mixed, gates = _draw((4, 2, 8), device)
    with pytest.raises(ValueError, match="differ"):
        kernels.sigmoid_gate(mixed, gates[:, :1])


def test_the_device_chooses_the_form(device: torch.device) -> None:
    mixed, gates = _draw((4, 2, 8), device)
    form = kernels if device.type == "cuda" else naive
    assert torch.equal(gate.sigmoid_gate(mixed, gates), form.sigmoid_gate(mixed, gates))
