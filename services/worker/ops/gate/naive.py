"""Output gates as torch operations, the form of every device without kernels. Any float dtype."""

import torch

__all__ = ["sigmoid_gate"]


def sigmoid_gate(mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`mixed · sigmoid(gate)` of heads `[N, H, D]`; returns `[N, H · D]`."""
    return mixed.flatten(-2) * gate.flatten(-2).sigmoid()
