"""Lightning attention's decays and its grouped norm, against numbers worked out by hand."""

import math

import pytest
import torch

from services.worker.mixers.lightning import alibi_slopes, layer_slopes
from services.worker.ops.norm import grouped_rms_norm, rms_norm


def test_slopes_of_a_power_of_two() -> None:
    assert alibi_slopes(4) == (2**-2, 2**-4, 2**-6, 2**-8)
    assert alibi_slopes(16)[0] == pytest.approx(math.sqrt(0.5))
    assert alibi_slopes(64)[-1] == 2**-8


def test_slopes_of_other_counts_fill_up_from_the_power_above() -> None:
    assert alibi_slopes(3) == (2**-4, 2**-8, 2**-2)
    assert alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)


@pytest.mark.parametrize(("offset", "factors"), [(0, (1.0, 0.75, 0.5, 0.25, 0.0)), (1, (1.25, 1.0, 0.75, 0.5, 0.25))])
def test_slopes_fall_with_depth(offset: int, factors: tuple[float, ...]) -> None:
    for layer, factor in enumerate(factors):
        assert layer_slopes(2, layer, 5, offset) == pytest.approx((2**-4 * (factor + 1e-5), 2**-8 * (factor + 1e-5)))


def test_one_layer_has_a_decay() -> None:
    assert layer_slopes(1, 0, 1) == pytest.approx((2**-8 * (1 + 1e-5),))


def test_each_group_of_channels_is_normed_alone() -> None:
    hidden = torch.tensor([[3.0, 4.0, 30.0, 40.0]])
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rms = math.sqrt(12.5)
    expected = torch.tensor([[3 / rms, 8 / rms, 9 / rms, 16 / rms]])
    torch.testing.assert_close(grouped_rms_norm(hidden, weight, 2, 0.0), expected)
    torch.testing.assert_close(grouped_rms_norm(hidden, weight, 1, 1e-5), rms_norm(hidden, weight, 1e-5))
    assert grouped_rms_norm(hidden.bfloat16(), weight.bfloat16(), 2, 0.0).dtype == torch.bfloat16
