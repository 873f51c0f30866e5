"""Output gates on a GPU: one launch, which reads the gate where the projection left it."""

import torch
import triton
import triton.language as tl

__all__ = ["sigmoid_gate"]

_TILE = 2048


@triton.jit
def _gate_kernel(
    mixed, gate, outputs, rows, mixed_outer_stride, mixed_inner_stride, gate_outer_stride, gate_inner_stride,
    H: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A block of heads of tokens, in fp32."""
    o_r, o_d = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64), tl.arange(0, BD)
    token, head = o_r // H, o_r % H
    m_x = (o_r < rows)[:, None] & (o_d < D)[None, :]
    p_m = (token * mixed_outer_stride + head * mixed_inner_stride)[:, None] + o_d[None, :]
    p_g = (token * gate_outer_stride + head * gate_inner_stride)[:, None] + o_d[None, :]
    b_g = tl.sigmoid(tl.load(gate + p_g, mask=m_x, other=0.0).to(tl.float32))
    b_y = tl.load(mixed + p_m, mask=m_x, other=0.0).to(tl.float32) * b_g
    tl.store(outputs + o_r[:, None] * D + o_d[None, :], b_y.to(outputs.dtype.element_ty), mask=m_x)


def sigmoid_gate(mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As `naive.sigmoid_gate`.

    Raises:
        ValueError: heads and gates have different shapes.
    """
    if mixed.shape != gate.shape:
        raise ValueError(f"heads {tuple(mixed.shape)} and gates {tuple(gate.shape)} differ")
    mixed, gate = (heads if heads.stride(-1) == 1 else heads.contiguous() for heads in (mixed, gate))
    num_tokens, heads, channels = mixed.shape
    outputs = torch.empty(num_tokens, heads * channels, dtype=mixed.dtype, device=mixed.device)
    channel_block = triton.next_power_of_2(channels)
    rows = max(1, _TILE // channel_block)
    _gate_kernel[(triton.cdiv(num_tokens * heads, rows),)](
        mixed, gate, outputs, num_tokens * heads,
        mixed.stride(0), mixed.stride(1), gate.stride(0), gate.stride(1),
        H=heads, D=channels, BR=rows, BD=channel_block, num_warps=4,
    )  # fmt: skip
    return outputs
