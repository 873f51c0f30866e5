"""Routed experts as one product an expert that was chosen, over the rows that chose it."""

import torch
import torch.nn.functional as F

from services.worker.ops.routed_swiglu.types import Choice, SharedTerm

__all__ = ["feed_forward"]


def feed_forward(
    hidden: torch.Tensor,
    choice: Choice,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: SharedTerm | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `naive.feed_forward`; the sum is fp32."""
    flat = choice.experts.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=gate_up.shape[0]).tolist()
    rows = (order // choice.experts.shape[1]).split(counts)
    weights = choice.weights.flatten()[order].split(counts)
    mixed = torch.zeros(hidden.shape, device=hidden.device)
    for expert, own in enumerate(rows):
        if len(own):
            gate, up = F.linear(hidden[own], gate_up[expert]).chunk(2, dim=-1)
            outputs = F.linear(F.silu(gate) * up, down[expert])
            mixed.index_add_(0, own, outputs.float() * weights[expert][:, None])
    if shared is not None:
        mixed += shared.scaled(mixed.dtype)
    if residual is not None:
        mixed += residual
    return mixed.to(hidden.dtype)
