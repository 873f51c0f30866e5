"""The op on a GPU: one launch, which reads and writes every channel once."""

import torch
import triton
import triton.language as tl

from services.worker.ops.delta_gates.types import DeltaGates, DeltaHeads
from services.worker.ops.recurrence.types import RecurrenceInputs

__all__ = ["open_gates"]

_TOKENS = 8


@triton.jit
def _head(rows, target, o_t, m_t, head, first, channels, stride, C: tl.constexpr, BC: tl.constexpr, scale):
    """Channels of one head of a block of tokens behind `silu`; normed and scaled where scale is not 0."""
    o_c = tl.arange(0, BC)
    m_x = m_t[:, None] & (o_c < C)[None, :]
    p_x = o_t.to(tl.int64)[:, None] * stride + first + head * C + o_c[None, :]
    b_x = tl.load(rows + p_x, mask=m_x, other=0.0).to(tl.float32)
    b_x *= tl.sigmoid(b_x)
    if scale != 0.0:
        b_x *= (scale * tl.rsqrt(tl.sum(b_x * b_x, axis=1) + 1e-6))[:, None]
    p_y = o_t.to(tl.int64)[:, None] * channels + head * C + o_c[None, :]
    tl.store(target + p_y, b_x.to(target.dtype.element_ty), mask=m_x)


@triton.jit
def _open_kernel(
    rows, step, beta, rate, bias, q, k, v, log_decay, opened, N, stride, step_stride, beta_stride, scale,
    Hk: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """A block of tokens and one head of queries, keys or values in this order; behind them the gates of all heads."""
    i_h = tl.program_id(1)
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    m_t = o_t < N
    if i_h < Hk:
        _head(rows, q, o_t, m_t, i_h, 0, Hk * K, stride, K, BK, scale)
    elif i_h < 2 * Hk:
        _head(rows, k, o_t, m_t, i_h - Hk, Hk * K, Hk * K, stride, K, BK, 1.0)
    elif i_h < 2 * Hk + H:
        _head(rows, v, o_t, m_t, i_h - 2 * Hk, 2 * Hk * K, H * V, stride, V, BV, 0.0)
    else:
        o_h = tl.arange(0, BH)
        m_g = m_t[:, None] & (o_h < H)[None, :]
        p_g = o_t.to(tl.int64)[:, None] * H + o_h[None, :]
        b_x = tl.load(step + o_t.to(tl.int64)[:, None] * step_stride + o_h[None, :], mask=m_g, other=0.0)
        b_x = b_x.to(tl.float32) + tl.load(bias + o_h, mask=o_h < H, other=0.0)[None, :]
        # log(1 + e^x) without an overflow; log(u) e / (u - 1) with u = 1 + e keeps the small steps of slow gates.
        b_e = tl.exp(-tl.abs(b_x))
        b_u = 1.0 + b_e
        b_d = b_u - 1.0
        b_l = tl.where(b_d == 0.0, b_e, tl.log(b_u) * b_e / tl.where(b_d == 0.0, 1.0, b_d))
        b_x = tl.maximum(b_x, 0.0) + b_l
        tl.store(log_decay + p_g, -b_x * tl.load(rate + o_h, mask=o_h < H, other=0.0)[None, :], mask=m_g)
        b_b = tl.load(beta + o_t.to(tl.int64)[:, None] * beta_stride + o_h[None, :], mask=m_g, other=0.0)
        tl.store(opened + p_g, tl.sigmoid(b_b.to(tl.float32)), mask=m_g)


def open_gates(rows: torch.Tensor, gates: DeltaGates, heads: DeltaHeads) -> RecurrenceInputs:
    """As `naive.open_gates`, on a GPU; q, k and v are of the rows' dtype, channels of a row must be contiguous."""
    tokens = rows.shape[0]
    q, k = (rows.new_empty(tokens, heads.num_key_heads, heads.key_dim) for _ in range(2))
    v = rows.new_empty(tokens, heads.num_value_heads, heads.value_dim)
    log_decay, beta = (
        torch.empty(tokens, heads.num_value_heads, dtype=torch.float32, device=rows.device) for _ in range(2)
    )
    grid = (triton.cdiv(tokens, _TOKENS), 2 * heads.num_key_heads + heads.num_value_heads + 1)
    _open_kernel[grid](
        rows, gates.step, gates.beta, gates.rate, gates.bias, q, k, v, log_decay, beta,
        tokens, rows.stride(0), gates.step.stride(0), gates.beta.stride(0), heads.key_dim**-0.5,
        Hk=heads.num_key_heads, H=heads.num_value_heads, K=heads.key_dim, V=heads.value_dim,
        BK=triton.next_power_of_2(heads.key_dim), BV=triton.next_power_of_2(heads.value_dim),
        BH=triton.next_power_of_2(heads.num_value_heads), BT=_TOKENS, num_warps=4,
    )  # fmt: skip
    return RecurrenceInputs(q, k, v, log_decay, beta)
