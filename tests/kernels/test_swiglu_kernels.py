"""SwiGLU's activation kernel against the naive form, on sizes that fill no tile."""

import pytest
import torch

from services.worker.ops.swiglu import naive
from services.worker.ops.swiglu import triton as kernels
from tests.exactness.rig import assert_close, assert_far

TOLERANCE = 1e-5


def _draw(rows: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(rows)).to(device)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 21), (130, 64), (3, 1030)])
def test_equals_the_naive_form(rows: int, size: int, device: torch.device) -> None:
    gate_up = _draw(rows, size, device)
    assert_close(kernels.activate(gate_up), naive.activate(gate_up), TOLERANCE)


def test_rows_may_stand_apart(device: torch.device) -> None:
    gate_up = _draw(7, 30, device)
    slices = (gate_up[:, 3:45], gate_up[::2], gate_up.t().contiguous().t())
    for rows in slices:
        assert_close(kernels.activate(rows), naive.activate(rows), TOLERANCE)


def test_half_precision_rounds_once(device: torch.device) -> None:
    gate_up = _draw(9, 33, device).half()
    actual = kernels.activate(gate_up)
    assert actual.dtype == torch.float16
    assert_close(actual, naive.activate(gate_up.float()), 2**-10)


def test_control(device: torch.device) -> None:
    gate_up = _draw(7, 21, device)
    assert_far(kernels.activate(gate_up.roll(21, 1)), naive.activate(gate_up), TOLERANCE)
