"""The delta rule's way in against its naive form: heads inside wider rows, sizes that fill no tile, large steps."""

import pytest
import torch

from services.worker.ops.delta_gates import DeltaGates, DeltaHeads, naive
from services.worker.ops.delta_gates import triton as kernels
from services.worker.ops.recurrence import RecurrenceInputs
from tests.exactness.rig import assert_close, assert_far

TOLERANCE = 2e-6
NAMES = ("q", "k", "v", "log_decay", "beta")


def _draw(heads: DeltaHeads, tokens: int, device: torch.device) -> tuple[torch.Tensor, DeltaGates]:
    """All of it slices of one wide row, as a fused projection gives them."""
    generator = torch.Generator().manual_seed(tokens)
    count, channels = heads.num_value_heads, 2 * heads.key_channels + heads.num_value_heads * heads.value_dim
    wide = torch.randn(tokens, channels + 2 * count + 3, generator=generator).to(device)
    rows, beta, step, _ = wide.split([channels, count, count, 3], dim=-1)
    rate, bias = (torch.rand(count, generator=generator).to(device) for _ in range(2))
    return rows, DeltaGates(12 * step, beta, rate, bias)


@pytest.mark.parametrize("heads", [DeltaHeads(2, 4, 12, 7), DeltaHeads(1, 3, 40, 72), DeltaHeads(2, 2, 5, 16)], ids=str)
@pytest.mark.parametrize("tokens", [1, 19])
def test_equals_the_naive_form(heads: DeltaHeads, tokens: int, device: torch.device) -> None:
    rows, gates = _draw(heads, tokens, device)
    expected, actual = naive.open_gates(rows, gates, heads), kernels.open_gates(rows, gates, heads)
    for name in NAMES:
        assert_close(getattr(actual, name), getattr(expected, name), TOLERANCE, name)
    swapped = kernels.open_gates(rows, DeltaGates(gates.beta, gates.step, gates.rate, gates.bias), heads)
    assert_far(swapped.log_decay, expected.log_decay, TOLERANCE)


def test_half_precision_is_widened_inside(device: torch.device) -> None:
    heads = DeltaHeads(2, 4, 12, 8)
    rows, gates = _draw(heads, 5, device)
    expected = naive.open_gates(rows.half(), gates, heads)
    actual: RecurrenceInputs = kernels.open_gates(rows.half(), gates, heads)
    assert {actual.q.dtype, actual.k.dtype, actual.v.dtype} == {torch.float16}
    assert {actual.log_decay.dtype, actual.beta.dtype if actual.beta is not None else None} == {torch.float32}
    for name in NAMES:
        assert_close(getattr(actual, name).float(), getattr(expected, name), 1e-3, name)


def test_slow_gates_keep_their_digits(device: torch.device) -> None:
    """Steps of e^−18 to e^−2, one by one against fp64: beside a large rate they decide what a head remembers."""
    heads = DeltaHeads(1, 4, 8, 8)
    rows, gates = _draw(heads, 40, device)
    step = torch.linspace(-18.0, -2.0, 160, device=device).view(40, 4)
    slow = DeltaGates(step, gates.beta, torch.full_like(gates.rate, 16.0), torch.zeros_like(gates.bias))
    expected = -16.0 * torch.nn.functional.softplus(step.double(), threshold=100.0)
    errors = (kernels.open_gates(rows, slow, heads).log_decay.double() / expected - 1.0).abs()
    assert float(errors.max()) <= 1e-5
    plain = -16.0 * torch.log(1.0 + step.exp())
    assert float((plain.double() / expected - 1.0).abs().max()) >= 1e-4
