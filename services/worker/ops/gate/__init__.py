"""Output gates, in the best form that a device has."""

from types import ModuleType

import torch

from services.worker.ops.device import runs_kernels
from services.worker.ops.gate import naive

__all__ = ["sigmoid_gate"]


def sigmoid_gate(mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Heads `mixed · sigmoid(gate)`, both `[N, H, D]`, the gate as it is projected; returns `[N, H · D]`."""
    gated: torch.Tensor = _form(mixed).sigmoid_gate(mixed, gate)
    return gated


def _form(heads: torch.Tensor) -> ModuleType:
    if not runs_kernels(heads):
        return naive
    from services.worker.ops.gate import triton

    return triton
