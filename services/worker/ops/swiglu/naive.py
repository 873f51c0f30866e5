"""SwiGLU's activation as torch operations, the form of every device without kernels. Any float dtype."""

import torch
import torch.nn.functional as F

__all__ = ["activate"]


def activate(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) · up` `[N, I]` of `[N, 2 I]`, the gate's channels first."""
    wide = gate_up.float() if gate_up.dtype in (torch.bfloat16, torch.float16) else gate_up
    gate, up = wide.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
