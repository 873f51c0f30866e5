"""The routing kernel against the naive form, on numbers of experts that fill no block, ties and groups among them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from services.worker.ops.routed_swiglu import Choice
from services.worker.ops.routing import RoutingRule, Scoring, naive
from services.worker.ops.routing import triton as kernels
from tests.exactness.rig import assert_close, assert_far

TOLERANCE = 1e-5
RULES = {
    "softmax": RoutingRule(5, 2, Scoring.SOFTMAX, renormalised=False),
    "renormalised": RoutingRule(37, 10, Scoring.SOFTMAX, renormalised=True),
    "block": RoutingRule(64, 8, Scoring.SOFTMAX, renormalised=True),
    "one": RoutingRule(3, 1, Scoring.SOFTMAX, renormalised=True),
    "all": RoutingRule(3, 3, Scoring.SOFTMAX, renormalised=True),
    "many": RoutingRule(520, 3, Scoring.SOFTMAX, renormalised=True),
    "sigmoid": RoutingRule(5, 2, Scoring.SIGMOID, renormalised=True, scale=2.446),
    "corrected": RoutingRule(6, 2, Scoring.SIGMOID, renormalised=True, corrected=True, scale=2.5),
    "groups": RoutingRule(12, 3, Scoring.SIGMOID, True, corrected=True, num_groups=4, top_groups=2, scale=2.5),
    "odd-groups": RoutingRule(35, 4, Scoring.SIGMOID, True, corrected=True, num_groups=5, top_groups=3),
    "softmax-groups": RoutingRule(18, 4, Scoring.SOFTMAX, False, num_groups=6, top_groups=2),
    "groups-of-one": RoutingRule(4, 2, Scoring.SIGMOID, False, num_groups=4, top_groups=2),
}


def _draw(rule: RoutingRule, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits and bias of distinct scores."""
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, rule.num_experts, generator=generator).to(device)
    bias = torch.randn(rule.num_experts, generator=generator).to(device)
    return logits, bias if rule.corrected else None


def _assert_alike(actual: Choice, expected: Choice) -> None:
    assert actual.experts.dtype == expected.experts.dtype == torch.int32
    assert torch.equal(actual.experts, expected.experts)
    assert actual.weights.dtype == torch.float32
    assert_close(actual.weights, expected.weights, TOLERANCE)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("tokens", [1, 7, 200])
def test_equals_the_naive_form(rule: RoutingRule, tokens: int, device: torch.device) -> None:
    logits, bias = _draw(rule, tokens, device)
    _assert_alike(kernels.choose(rule, logits, bias), naive.choose(rule, logits, bias))


@pytest.mark.parametrize("name", ["renormalised", "odd-groups"])
def test_logits_may_be_a_slice(name: str, device: torch.device) -> None:
    """What stands beside the slice would be chosen if it were read."""
    rule = RULES[name]
    logits, bias = _draw(rule, 7, device)
    wider = torch.full((7, rule.num_experts + 3), 1e4, device=device)
    wider[:, : rule.num_experts] = logits
    expected = naive.choose(rule, logits, bias)
    _assert_alike(kernels.choose(rule, wider[:, : rule.num_experts], bias), expected)
    _assert_alike(kernels.choose(rule, logits.t().contiguous().t(), bias), expected)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_of_equals_the_first_is_taken(rule: RoutingRule, device: torch.device) -> None:
    """Scores of few levels, so that experts and groups are equal in every row."""
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(0, 2, (50, rule.num_experts), generator=generator).float().to(device)
    bias = torch.zeros(rule.num_experts, device=device) if rule.corrected else None
    for logits in (levels, torch.zeros_like(levels)):
        _assert_alike(kernels.choose(rule, logits, bias), naive.choose(rule, logits, bias))


IGNORED: dict[str, tuple[str, dict[str, Any]]] = {
    "renormalised": ("softmax", {"renormalised": True}),
    "scoring": ("renormalised", {"scoring": Scoring.SIGMOID}),
    "top_k": ("renormalised", {"top_k": 9}),
    "scale": ("groups", {"scale": 1.0}),
    "groups": ("groups", {"num_groups": 1, "top_groups": 1}),
    "top_groups": ("odd-groups", {"top_groups": 1, "top_k": 4}),
    "bias": ("corrected", {"corrected": False}),
}


def _dense(rule: RoutingRule, choice: Choice) -> torch.Tensor:
    """Weights `[N, E]`, zero where an expert was not chosen."""
    weights = torch.zeros(len(choice.experts), rule.num_experts, device=choice.weights.device)
    return weights.scatter(1, choice.experts.long(), choice.weights)


@pytest.mark.parametrize("field", IGNORED)
def test_controls(field: str, device: torch.device) -> None:
    """A kernel that ignores one field is far from the naive form."""
    name, changes = IGNORED[field]
    rule, ignorant = RULES[name], replace(RULES[name], **changes)
    logits, bias = _draw(rule, 50, device)
    actual = kernels.choose(ignorant, logits, bias if ignorant.corrected else None)
    assert_far(_dense(rule, actual), _dense(rule, naive.choose(rule, logits, bias)), TOLERANCE)


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "groups"])
def test_scores_that_vanish_stay_finite(name: str, device: torch.device) -> None:
    rule = RULES[name]
    logits, bias = torch.full((2, rule.num_experts), -80.0, device=device), _draw(rule, 2, device)[1]
    actual, expected = kernels.choose(rule, logits, bias), naive.choose(rule, logits, bias)
    assert torch.equal(actual.experts, expected.experts)
    assert torch.allclose(actual.weights, expected.weights)


@pytest.mark.parametrize("name", ["softmax", "groups"])
def test_a_poisoned_row_chooses_experts_that_exist(name: str, device: torch.device) -> None:
    rule = RULES[name]
    logits, bias = _draw(rule, 7, device)
    poisoned = logits.clone()
    poisoned[4, 1] = float("nan")
    actual, expected = kernels.choose(rule, poisoned, bias), kernels.choose(rule, logits, bias)
    assert 0 <= int(actual.experts[4].min()) <= int(actual.experts[4].max()) < rule.num_experts
    assert bool(actual.weights[4].isnan().all())
    others = [row for row in range(7) if row != 4]
    assert torch.equal(actual.experts[others], expected.experts[others])
    assert torch.equal(actual.weights[others], expected.weights[others])


def test_logits_of_another_form_are_refused(device: torch.device) -> None:
    logits, _ = _draw(RULES["softmax"], 2, device)
    with pytest.raises(ValueError, match="fp32 and of 5 experts"):
        kernels.choose(RULES["softmax"], logits.bfloat16(), None)
    with pytest.raises(ValueError, match="fp32 and of 5 experts"):
        kernels.choose(RULES["softmax"], logits[:, :4], None)
