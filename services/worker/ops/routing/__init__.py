"""Which experts tokens choose and what each weighs, from a router's logits, in the best form that a device has."""

from types import ModuleType

import torch

from services.worker.ops.device import runs_kernels
from services.worker.ops.routed_swiglu import Choice
from services.worker.ops.routing import naive
from services.worker.ops.routing.types import RoutingRule, Scoring

__all__ = ["RoutingRule", "Scoring", "choose"]


def choose(rule: RoutingRule, logits: torch.Tensor, bias: torch.Tensor | None) -> Choice:
    """The experts of tokens by their logits `[N, E]` and the bias `[E]`, both fp32. Of equals the first is taken."""
    choice: Choice = _form(logits).choose(rule, logits, bias)
    return choice


def _form(logits: torch.Tensor) -> ModuleType:
    if not runs_kernels(logits):
        return naive
    from services.worker.ops.routing import triton

    return triton
