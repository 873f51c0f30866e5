"""Routed experts, one token and one expert at a time. Any float dtype; the sum is fp32 or wider."""

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
    """hidden `[N, H]`, gate_up `[E, 2 I, H]` with the gate's rows first, down `[E, H, I]`; returns `[N, H]`.

    residual `[N, H]`: what it is added to before it is rounded.
    """
    outputs = torch.zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    for token, row in enumerate(hidden):
        for expert, weight in zip(choice.experts[token].tolist(), choice.weights[token], strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            outputs[token] += weight * (down[expert] @ (F.silu(gate) * up)).to(outputs.dtype)
    if shared is not None:
        outputs += shared.scaled(outputs.dtype)
    if residual is not None:
        outputs += residual
    return outputs.to(hidden.dtype)
