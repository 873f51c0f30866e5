"""Routed experts in the best form that a device has."""

from importlib.util import find_spec

import torch

from services.worker.ops.routed_swiglu import grouped
from services.worker.ops.routed_swiglu.types import Choice

__all__ = ["feed_forward"]


def feed_forward(hidden: torch.Tensor, choice: Choice, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """As `naive.feed_forward`."""
    if not hidden.is_cuda or find_spec("triton") is None:
        return grouped.feed_forward(hidden, choice, gate_up, down)
    from services.worker.ops.routed_swiglu import triton

    return triton.feed_forward(hidden, choice, gate_up, down)
