"""Routed experts in the best form that a device has."""

import torch

from services.worker.ops.device import runs_kernels
from services.worker.ops.routed_swiglu import grouped
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
    """As `naive.feed_forward`."""
    if not runs_kernels(hidden):
        return grouped.feed_forward(hidden, choice, gate_up, down, shared, residual)
    from services.worker.ops.routed_swiglu import triton

    return triton.feed_forward(hidden, choice, gate_up, down, shared, residual)
