"""Norms over the last axis, computed in fp32 and returned in the input's dtype, in the best form that a device has."""

from types import ModuleType

import torch

from services.worker.ops.device import runs_kernels
from services.worker.ops.norm import naive

__all__ = ["add_rms_norm", "gated_rms_norm", "grouped_rms_norm", "l2_norm", "rms_norm"]


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / √(mean x² + ε) · weight` (arXiv 1910.07467); zero-centred checkpoints add 1 to the weight when they are loaded."""
    normed: torch.Tensor = _form(hidden).rms_norm(hidden, weight, eps)
    return normed


def add_rms_norm(
    hidden: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`hidden + update` in their dtype, and `rms_norm` of it: a residual and the norm behind it."""
    added: tuple[torch.Tensor, torch.Tensor] = _form(hidden).add_rms_norm(hidden, update, weight, eps)
    return added


def gated_rms_norm(hidden: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm(x) · silu(gate)`: the norm comes before the gate."""
    normed: torch.Tensor = _form(hidden).gated_rms_norm(hidden, gate, weight, eps)
    return normed


def grouped_rms_norm(hidden: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """As `rms_norm` of `[..., C]`, with a mean square of each of `groups` equal runs of channels."""
    normed: torch.Tensor = _form(hidden).grouped_rms_norm(hidden, weight, groups, eps)
    return normed


def l2_norm(vectors: torch.Tensor) -> torch.Tensor:
    """`x / √(Σx² + 1e-6)`, the constant of the public gated delta rule kernels."""
    normed: torch.Tensor = _form(vectors).l2_norm(vectors)
    return normed


def _form(vectors: torch.Tensor) -> ModuleType:
    if not runs_kernels(vectors):
        return naive
    from services.worker.ops.norm import triton

    return triton
