"""The norms' kernels against their naive form: widths that fill no tile, heads inside wider rows, half precision."""

import pytest
import torch

from services.worker.ops import norm
from services.worker.ops.norm import naive
from services.worker.ops.norm import triton as kernels
from tests.exactness.rig import assert_close, assert_far

TOLERANCE = 1e-6
EPS = 1e-3
SHAPES = [(5, 37), (3, 4, 20), (2, 3, 2, 8), (1, 2500)]


def _draw(shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """Small numbers, so that the constant under the root counts, as a slice of wider rows."""
    wide = torch.randn(*shape[:-1], shape[-1] + 5, generator=torch.Generator().manual_seed(seed))
    return (0.05 * wide).to(device)[..., 2:-3]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, ...], device: torch.device) -> None:
    hidden, weight = _draw(shape, 1, device), _draw(shape[-1:], 2, device).contiguous()
    expected = naive.rms_norm(hidden, weight, EPS)
    assert_close(kernels.rms_norm(hidden, weight, EPS), expected, TOLERANCE)
    assert_far(kernels.rms_norm(hidden, weight, 2 * EPS), expected, TOLERANCE)
    assert_far(kernels.rms_norm(hidden, weight.flip(0), EPS), expected, TOLERANCE)


@pytest.mark.parametrize("shape", [(5, 37), (1, 2500)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """The sum is rounded before it is normed; its parts lie in rows of different widths."""
    hidden, update = _draw(shape, 1, device).to(dtype), _draw(shape, 3, device).contiguous().to(dtype)
    weight = _draw(shape[-1:], 2, device).contiguous()
    expected, actual = (form.add_rms_norm(hidden, update, weight, EPS) for form in (naive, kernels))
    assert torch.equal(actual[0], expected[0])
    assert_close(actual[1].float(), expected[1].float(), TOLERANCE if dtype == torch.float32 else 1e-3)
    assert_far(kernels.rms_norm(hidden, weight, EPS).float(), expected[1].float(), 1e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_rms_norm(shape: tuple[int, ...], device: torch.device) -> None:
    """Hidden states and gates lie in rows of different widths."""
    hidden, gate, weight = _draw(shape, 1, device), _draw(shape, 3, device).contiguous(), _draw(shape[-1:], 2, device)
    expected = naive.gated_rms_norm(hidden, gate, weight, EPS)
    assert_close(kernels.gated_rms_norm(hidden, gate, weight, EPS), expected, TOLERANCE)
    assert_far(kernels.gated_rms_norm(hidden, gate.flip(0, -1), weight, EPS), expected, TOLERANCE)


@pytest.mark.parametrize("shape", [(5, 36), (2, 3, 600)], ids=str)
def test_grouped_rms_norm(shape: tuple[int, ...], device: torch.device) -> None:
    hidden, weight = _draw(shape, 1, device), _draw(shape[-1:], 2, device).contiguous()
    expected = naive.grouped_rms_norm(hidden, weight, 4, EPS)
    assert_close(kernels.grouped_rms_norm(hidden, weight, 4, EPS), expected, TOLERANCE)
    assert_far(kernels.grouped_rms_norm(hidden, weight, 2, EPS), expected, TOLERANCE)
    assert_far(kernels.grouped_rms_norm(hidden, weight.roll(shape[-1] // 4), 4, EPS), expected, TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_l2_norm(shape: tuple[int, ...], device: torch.device) -> None:
    vectors = 0.1 * _draw(shape, 1, device)
    expected = naive.l2_norm(vectors)
    assert_close(kernels.l2_norm(vectors), expected, TOLERANCE)
    assert_far(kernels.l2_norm(2 * vectors), 2 * expected, TOLERANCE)


def test_half_precision_is_widened_inside(device: torch.device) -> None:
    """Squares of 300 overflow fp16; they are summed in fp32, and the dtype comes back."""
    hidden, weight = torch.full((3, 64), 300.0, device=device).half(), torch.ones(64, device=device).half()
    actual = kernels.rms_norm(hidden, weight, EPS)
    assert actual.dtype == torch.float16
    assert_close(actual, torch.ones(3, 64), 1e-3)


def test_the_device_chooses_the_form(device: torch.device) -> None:
    hidden, weight = _draw((5, 37), 1, device), _draw((37,), 2, device)
    form = kernels if device.type == "cuda" else naive
    assert torch.equal(norm.rms_norm(hidden, weight, EPS), form.rms_norm(hidden, weight, EPS))
    assert torch.equal(
        norm.gated_rms_norm(hidden, hidden, weight, EPS), form.gated_rms_norm(hidden, hidden, weight, EPS)
    )
    assert torch.equal(norm.grouped_rms_norm(hidden, weight, 1, EPS), form.grouped_rms_norm(hidden, weight, 1, EPS))
    assert torch.equal(norm.l2_norm(hidden), form.l2_norm(hidden))
