"""What the kernels of paged attention share: tiles of queries and keys, which rows a tile sees, and the join of splits."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.ops.paged_attention.launch import Launch
from services.worker.ops.tiles import block

__all__ = ["LOG2_E", "Partials", "partners", "piece", "stored", "turned", "until", "whole_until"]

LOG2_E = 1.4426950408889634


@triton.jit
def partners(o_d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of every channel that turns: its frequency, the channel it turns with, and the sign of that one's share."""
    if INTERLEAVED:
        o_f, o_p, sign = o_d // 2, o_d ^ 1, tl.where(o_d % 2 == 0, -1.0, 1.0)
    else:
        is_first = o_d < HALF
        o_f, o_p = o_d % HALF, tl.where(is_first, o_d + HALF, o_d - HALF)
        sign = tl.where(is_first, -1.0, 1.0)
    return o_f, o_p, sign


@triton.jit
def turned(
    q, query_cos, query_sin, base_cos, base_sin, token, head, m_m, i_g,
    Hq: tl.constexpr, D: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The first W channels of a tile of queries, turned by their distance to a group's base; HALF 0: as they are.

    The angle is a difference of two angles whose cosines and sines are known: no reduction of large angles.
    """
    o_d = tl.arange(0, BR)
    m_q = m_m[:, None] & (o_d < W)[None, :]
    p_q = (token.to(tl.int64) * Hq + head)[:, None] * D
    b_q = tl.load(q + p_q + o_d[None, :], mask=m_q, other=0.0)
    if HALF > 0:
        m_f = o_d < 2 * HALF
        o_f, o_p, sign = partners(o_d, HALF, INTERLEAVED)
        p_f, m_t = token[:, None] * HALF + o_f[None, :], m_m[:, None] & m_f[None, :]
        q_cos, q_sin = tl.load(query_cos + p_f, mask=m_t, other=1.0), tl.load(query_sin + p_f, mask=m_t, other=0.0)
        b_cos = tl.load(base_cos + i_g * HALF + o_f, mask=m_f, other=1.0)[None, :]
        b_sin = tl.load(base_sin + i_g * HALF + o_f, mask=m_f, other=0.0)[None, :]
        b_p = tl.load(q + p_q + o_p[None, :], mask=m_t, other=0.0).to(tl.float32) * sign[None, :]
        b_y = b_q.to(tl.float32) * (q_cos * b_cos + q_sin * b_sin) + b_p * (q_sin * b_cos - q_cos * b_sin)
        b_q = b_y.to(b_q.dtype)
    return b_q


@triton.jit
def piece(q, token, head, m_m, begin: tl.constexpr, width: tl.constexpr, Hq: tl.constexpr, D: tl.constexpr):
    """A tile of queries' channels from `begin` on, which do not turn; width 0: of no use."""
    o_d = begin + tl.arange(0, max(16, width))
    m_q = m_m[:, None] & (o_d < D)[None, :]
    return tl.load(q + (token.to(tl.int64) * Hq + head)[:, None] * D + o_d[None, :], mask=m_q, other=0.0)


@triton.jit
def until(firsts, begin, end, farthest):
    """One past the last place in `[begin, end)` whose first position is not behind the farthest; they stand in rising order."""
    o_r = tl.arange(0, 64)
    stop = begin
    for i_r in range(begin, end, 64):
        m_r = i_r + o_r < end
        first = tl.load(firsts + i_r + o_r, mask=m_r, other=0)
        stop += tl.sum((m_r & (first <= farthest)).to(tl.int32), axis=0)
    return stop


@triton.jit
def whole_until(firsts, counts, begin, end, nearest, PAGE: tl.constexpr):
    """One past the last of the first places in `[begin, end)` that are full pages at or before the nearest query."""
    o_r = tl.arange(0, 64)
    stop = end
    for i_r in range(begin, end, 64):
        m_r = i_r + o_r < end
        first = tl.load(firsts + i_r + o_r, mask=m_r, other=0)
        count = tl.load(counts + i_r + o_r, mask=m_r, other=PAGE)
        is_cut = m_r & ((count < PAGE) | (first + PAGE - 1 > nearest))
        stop = tl.minimum(stop, tl.min(tl.where(is_cut, i_r + o_r, end), axis=0))
    return stop


@triton.jit
def stored(p_n, m_n, begin: tl.constexpr, width: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Channels of keys or values from `begin` on; not MASKED: of all of them."""
    o_d = begin + tl.arange(0, width)
    if MASKED or begin + width > D:
        b_n = tl.load(p_n + o_d[None, :], mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)
    else:
        b_n = tl.load(p_n + o_d[None, :])
    return b_n


@triton.jit
def _join_kernel(
    partial, maxima, totals, cu_partial, outputs,
    Hq: tl.constexpr, Dv: tl.constexpr, BS: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """One token, head and block of channels: the partial results of its splits; nothing where its block is not split."""
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_v = tl.arange(0, BS), tl.program_id(2) * BDV + tl.arange(0, BDV)
    begin, end = tl.load(cu_partial + i_t), tl.load(cu_partial + i_t + 1)
    b_m = float("-inf")
    b_l = tl.where(begin < end, 0.0, 1.0)
    b_o = tl.zeros([BDV], dtype=tl.float32)
    for i_s in range(begin, end, BS):
        m_s = i_s + o_s < end
        row = (i_s + o_s).to(tl.int64) * Hq + i_h
        own = tl.load(maxima + row, mask=m_s, other=float("-inf"))
        top = tl.maximum(b_m, tl.max(own, axis=0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        old, new = tl.exp2(b_m - shift), tl.exp2(own - shift)
        m_o = m_s[:, None] & (o_v < Dv)[None, :]
        b_p = tl.load(partial + row[:, None] * Dv + o_v[None, :], mask=m_o, other=0.0)
        b_o = b_o * old + tl.sum(b_p * new[:, None], axis=0)
        b_l = b_l * old + tl.sum(tl.load(totals + row, mask=m_s, other=0.0) * new, axis=0)
        b_m = top
    p_o = (i_t * Hq + i_h) * Dv + o_v
    tl.store(outputs + p_o, (b_o / b_l).to(outputs.dtype.element_ty), mask=(o_v < Dv) & (begin < end))


@dataclass(frozen=True, slots=True)
class Partials:
    """Room for the results of splits: outputs `[rows, Hq, Dv]`, maxima and totals `[rows, Hq]` of their weights, fp32."""

    outputs: torch.Tensor
    maxima: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def of(cls, launch: Launch, outputs: torch.Tensor) -> "Partials":
        """For a launch with such outputs `[N, Hq, Dv]`."""
        rows, (_, heads, value_dim) = max(1, launch.num_partial), outputs.shape
        partial = torch.empty(rows, heads, value_dim, dtype=torch.float32, device=outputs.device)
        sums = torch.empty(2, rows, heads, dtype=torch.float32, device=outputs.device)
        return cls(partial, sums[0], sums[1])

    def join(self, launch: Launch, outputs: torch.Tensor) -> None:
        """Write the outputs of what is split; the kernel has written the others."""
        if not launch.num_partial:
            return
        tokens, heads, value_dim = outputs.shape
        # Few splits are read at once with all channels; many need programs to share the channels of one token.
        splits = 16 if launch.num_partial <= 32 * tokens else 64
        width = min(4096 // splits, block(value_dim))
        _join_kernel[(tokens, heads, triton.cdiv(value_dim, width))](
            self.outputs, self.maxima, self.totals, launch.cu_partial, outputs,
            Hq=heads, Dv=value_dim, BS=splits, BDV=width, num_warps=4,
        )  # fmt: skip
