"""Norms as torch operations, the form of every device without kernels. Any float dtype."""

import torch
import torch.nn.functional as F

__all__ = ["add_rms_norm", "gated_rms_norm", "grouped_rms_norm", "l2_norm", "rms_norm"]


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / rms(x) · weight` over the last axis; zero-centred checkpoints add 1 to the weight when they are loaded."""
    wide = hidden.float() if hidden.dtype in (torch.bfloat16, torch.float16) else hidden
    return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(hidden.dtype)


def add_rms_norm(
    hidden: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`hidden + update`, and the norm of it."""
    total = hidden + update
    return total, rms_norm(total, weight, eps)


def gated_rms_norm(hidden: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm(x) · silu(gate)`: the norm comes before the gate."""
    return rms_norm(hidden, weight, eps) * F.silu(gate)


def grouped_rms_norm(hidden: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """`x / rms(x) · weight` `[..., C]`, the mean square taken over each of `groups` equal runs of channels."""
    wide = hidden.float() if hidden.dtype in (torch.bfloat16, torch.float16) else hidden
    runs = wide.unflatten(-1, (groups, -1))
    normed = F.rms_norm(runs, runs.shape[-1:], eps=eps).flatten(-2)
    return (normed * weight.to(wide.dtype)).to(hidden.dtype)


def l2_norm(vectors: torch.Tensor) -> torch.Tensor:
    """`x / √(Σx² + 1e-6)` over the last axis, the constant of the public gated delta rule kernels."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)
