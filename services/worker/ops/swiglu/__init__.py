"""The activation of a SwiGLU block, in the best form that a device has."""

from types import ModuleType

import torch

from services.worker.ops.device import runs_kernels
from services.worker.ops.swiglu import naive

__all__ = ["activate"]


def activate(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) · up` `[N, I]` of `[N, 2 I]`, the gate's channels first (arXiv 2002.05202); fp32 inside."""
    activated: torch.Tensor = _form(gate_up).activate(gate_up)
    return activated


def _form(vectors: torch.Tensor) -> ModuleType:
    if not runs_kernels(vectors):
        return naive
    from services.worker.ops.swiglu import triton

    return triton
