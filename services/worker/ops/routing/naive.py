"""Routing as torch operations, the form of every device without kernels."""

import torch

from services.worker.ops.routed_swiglu import Choice
from services.worker.ops.routing.types import RoutingRule, Scoring

__all__ = ["choose"]


def choose(rule: RoutingRule, logits: torch.Tensor, bias: torch.Tensor | None) -> Choice:
    """The experts of tokens by their logits `[N, E]` and the bias `[E]`, both fp32. Of equals the first is taken."""
    scores = logits.softmax(-1) if rule.scoring is Scoring.SOFTMAX else logits.sigmoid()
    open_scores = _in_best_groups(rule, scores if bias is None else scores + bias)
    experts = _best(open_scores, rule.top_k)
    weights = scores.gather(-1, experts)
    if rule.renormalised:
        # The constant is that of the public routers: sigmoid scores may all round to zero.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Choice(experts.int(), weights * rule.scale)


def _in_best_groups(rule: RoutingRule, scores: torch.Tensor) -> torch.Tensor:
    """Scores with those of all but the best groups closed by −∞."""
    if rule.top_groups == rule.num_groups:
        return scores
    grouped: torch.Tensor = scores.unflatten(-1, (rule.num_groups, rule.group_size))
    worth = grouped.topk(min(2, rule.group_size), dim=-1).values.sum(-1)
    closed = torch.ones_like(worth, dtype=torch.bool).scatter(-1, _best(worth, rule.top_groups), value=False)
    return grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the largest; `topk` would leave it to the device which of two equals it takes."""
    order: torch.Tensor = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count]
