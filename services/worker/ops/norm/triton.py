"""Norms on a GPU: one launch, which reads and writes every vector once."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["add_rms_norm", "gated_rms_norm", "grouped_rms_norm", "l2_norm", "rms_norm"]

_TILE = 2048


@triton.jit
def _norm_kernel(
    vectors, weight, gate, outputs, rows, inner, D, divisor, eps,
    outer_stride, inner_stride, gate_outer_stride, gate_inner_stride, weight_stride,
    BR: tl.constexpr, BD: tl.constexpr, WEIGHTED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A block of vectors: `x / √(Σx² / divisor + ε)`, times weight and `silu(gate)` where there are such."""
    o_r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_x = (o_r < rows)[:, None] & (o_d < D)[None, :]
    p_x = (o_r // inner * outer_stride + o_r % inner * inner_stride)[:, None] + o_d[None, :]
    b_x = tl.load(vectors + p_x, mask=m_x, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=1) / divisor + eps)[:, None]
    if WEIGHTED:
        p_w = (o_r % inner * weight_stride)[:, None] + o_d[None, :]
        b_y *= tl.load(weight + p_w, mask=m_x, other=0.0).to(tl.float32)
    if GATED:
        p_g = (o_r // inner * gate_outer_stride + o_r % inner * gate_inner_stride)[:, None] + o_d[None, :]
        b_g = tl.load(gate + p_g, mask=m_x, other=0.0).to(tl.float32)
        b_y *= b_g * tl.sigmoid(b_g)
    tl.store(outputs + o_r[:, None] * D + o_d[None, :], b_y.to(outputs.dtype.element_ty), mask=m_x)


@triton.jit
def _add_norm_kernel(
    hidden, update, weight, total, outputs, rows, D, hidden_stride, update_stride, eps,
    BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A block of rows: their sum with an update, rounded as it is stored, and the norm of that."""
    o_r = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    o_d = tl.arange(0, BD)
    m_x = (o_r < rows) & (o_d < D)[None, :]
    b_x = tl.load(hidden + o_r * hidden_stride + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_x += tl.load(update + o_r * update_stride + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_x = b_x.to(total.dtype.element_ty)
    tl.store(total + o_r * D + o_d[None, :], b_x, mask=m_x)
    b_y = b_x.to(tl.float32)
    b_y *= tl.rsqrt(tl.sum(b_y * b_y, axis=1) / D + eps)[:, None]
    b_y *= tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    tl.store(outputs + o_r * D + o_d[None, :], b_y.to(outputs.dtype.element_ty), mask=m_x)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Vectors `[rows, D]` of which every `inner` neighbours stand `inner_stride` apart, as heads of a wider row do."""

    vectors: torch.Tensor
    inner: int
    outer_stride: int
    inner_stride: int

    @classmethod
    def of(cls, vectors: torch.Tensor) -> "_Rows":
        """Any shape; only vectors that are not contiguous in themselves, or stand in deeper shapes, may be copied."""
        if vectors.stride(-1) != 1:
            vectors = vectors.contiguous()
        if vectors.ndim == 3:
            return cls(vectors, vectors.shape[1], vectors.stride(0), vectors.stride(1))
        flat = vectors.reshape(-1, vectors.shape[-1])
        return cls(flat, 1, flat.stride(0), 0)


def _norm(
    vectors: torch.Tensor,
    weight: torch.Tensor | None,
    gate: torch.Tensor | None,
    divisor: float,
    eps: float,
    weight_stride: int = 0,
) -> torch.Tensor:
    """weight_stride: from the weight of one vector to that of its inner neighbour, 0 where all have one."""
    channels = vectors.shape[-1]
    outputs = torch.empty(vectors.shape, dtype=vectors.dtype, device=vectors.device)
    own = _Rows.of(vectors)
    gates = own if gate is None else _Rows.of(gate)
    rows, block = vectors.numel() // channels, triton.next_power_of_2(channels)
    rows_a_program = max(1, _TILE // block)
    _norm_kernel[(triton.cdiv(rows, rows_a_program),)](
        own.vectors, own.vectors if weight is None else weight, gates.vectors, outputs,
        rows, own.inner, channels, divisor, eps,
        own.outer_stride, own.inner_stride, gates.outer_stride, gates.inner_stride, weight_stride,
        BR=rows_a_program, BD=block, WEIGHTED=weight is not None, GATED=gate is not None,
        num_warps=4 if block <= 2 * _TILE else 8,
    )  # fmt: skip
    return outputs


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `naive.rms_norm`."""
    return _norm(hidden, weight, None, float(hidden.shape[-1]), eps)


def add_rms_norm(
    hidden: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `naive.add_rms_norm`, of rows `[N, D]` whose channels are contiguous."""
    rows, channels = hidden.shape
    total, outputs = hidden.new_empty(rows, channels), hidden.new_empty(rows, channels)
    block = triton.next_power_of_2(channels)
    rows_a_program = max(1, _TILE // block)
    _add_norm_kernel[(triton.cdiv(rows, rows_a_program),)](
        hidden, update, weight, total, outputs, rows, channels, hidden.stride(0), update.stride(0), eps,
        BR=rows_a_program, BD=block, num_warps=4 if block <= 2 * _TILE else 8,
    )  # fmt: skip
    return total, outputs


def gated_rms_norm(hidden: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `naive.gated_rms_norm`."""
    return _norm(hidden, weight, gate, float(hidden.shape[-1]), eps)


def grouped_rms_norm(hidden: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """As `naive.grouped_rms_norm`."""
    size = hidden.shape[-1] // groups
    runs = hidden.reshape(-1, hidden.shape[-1]).unflatten(-1, (groups, size))
    return _norm(runs, weight, None, float(size), eps, weight_stride=size).view(hidden.shape)


def l2_norm(vectors: torch.Tensor) -> torch.Tensor:
    """As `naive.l2_norm`."""
    return _norm(vectors, None, None, 1.0, 1e-6)
