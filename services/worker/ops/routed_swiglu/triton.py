"""Routed experts on a GPU, with nothing that waits for the device: launches whose grids the shapes alone decide.

`_order_kernel` puts pairs in the order of their experts. Of many pairs `_count_kernel` counts those of every block and
expert, a running sum over the counts, expert by expert, says where each block's begin, and `_place_kernel` puts them there.
`_gate_up_kernel` and `_down_kernel` run a program a tile of one expert's pairs and block of columns; how many tiles there
are, and whose they are, every program works out from the experts' offsets, and programs behind the last tile end at once.
`_sum_kernel` adds a token's experts in the order of its choice, then the shared term and the residual, so that no result
depends on which program was first. Columns are the fastest axis of the grids: programs that run together read the same rows,
and an expert's tiles meet its weights in L2.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.ops.routed_swiglu.types import Choice, SharedTerm

__all__ = ["feed_forward"]

# Every program of `_order_kernel` reads all pairs, which is one short launch for few and too much for many.
_MOST_PAIRS_READ = 16384
_BLOCK_PAIRS = 256
# Pairs of a few requests that decode.
_FEW_PAIRS = 64
_SUM_CHANNELS = 1024


@triton.jit
def _order_kernel(
    experts, order, firsts, P, E,
    BP: tl.constexpr,
):  # fmt: skip
    """One expert: where its pairs begin, and which they are, in their own order. The last one closes `firsts`."""
    i_e = tl.program_id(0)
    o_p = tl.arange(0, BP)
    b_before = tl.zeros([BP], dtype=tl.int32)
    for begin in range(0, P, BP):
        b_e = tl.load(experts + begin + o_p, mask=begin + o_p < P, other=E)
        b_before += (b_e < i_e).to(tl.int32)
    place = tl.sum(b_before, axis=0)
    tl.store(firsts + i_e, place)
    for begin in range(0, P, BP):
        b_e = tl.load(experts + begin + o_p, mask=begin + o_p < P, other=E)
        b_own = (b_e == i_e).to(tl.int32)
        tl.store(order + place + tl.cumsum(b_own, axis=0) - 1, begin + o_p, mask=b_e == i_e)
        place += tl.sum(b_own, axis=0)
    if i_e == E - 1:
        tl.store(firsts + E, place)


@triton.jit
def _count_kernel(
    experts, counts, P, E,
    BP: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """How many pairs of one block every expert has, at `1 + expert * blocks + block`; a zero stands before all."""
    i_b = tl.program_id(0)
    o_p, o_e = i_b * BP + tl.arange(0, BP), tl.arange(0, BE)
    # Places behind the last pair count for a column that is nobody's.
    b_e = tl.load(experts + o_p, mask=o_p < P, other=E).to(tl.int32)
    tl.store(counts + 1 + o_e * tl.num_programs(0) + i_b, tl.histogram(b_e, BE), mask=o_e < E)
    if i_b == 0:
        tl.store(counts, 0)


@triton.jit
def _place_kernel(
    experts, starts, order, P,
    BP: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """The pairs of one block behind its start at their expert, after those before them in the block."""
    i_b = tl.program_id(0)
    o_p = i_b * BP + tl.arange(0, BP)
    b_e = tl.load(experts + o_p, mask=o_p < P, other=0)
    b_before = tl.zeros([BP], dtype=tl.int32)
    for begin in range(0, BP, BJ):
        o_j = i_b * BP + begin + tl.arange(0, BJ)
        b_j = tl.load(experts + o_j, mask=o_j < P, other=0)
        m_j = (b_j[:, None] == b_e[None, :]) & (o_j[:, None] < o_p[None, :])
        b_before += tl.sum(m_j.to(tl.int32), axis=0)
    b_place = tl.load(starts + b_e * tl.num_programs(0) + i_b, mask=o_p < P, other=0) + b_before
    tl.store(order + b_place, o_p, mask=o_p < P)


@triton.jit
def _find_tile(firsts, i_t, E, BM: tl.constexpr, BE: tl.constexpr):
    """The expert of a tile, its first place in the order and one past its expert's last; nothing lies behind the last tile."""
    o_e = tl.arange(0, BE)
    b_first = tl.load(firsts + o_e, mask=o_e < E, other=0)
    b_end = tl.load(firsts + o_e + 1, mask=o_e < E, other=0)
    b_tiles = (b_end - b_first + BM - 1) // BM
    b_behind = tl.cumsum(b_tiles, axis=0)
    expert = tl.sum((b_behind <= i_t).to(tl.int32), axis=0)
    begin = tl.sum(tl.where(o_e == expert, b_first + (i_t - b_behind + b_tiles) * BM, 0), axis=0)
    end = tl.sum(tl.where(o_e == expert, b_end, 0), axis=0)
    return expert, begin, end


@triton.jit
def _gate_up_kernel(
    hidden, gate_up, order, firsts, activated, E, H, F,
    TOP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`silu(gate x) · up x` of one tile and block of columns, stored in the order of experts."""
    i_n, i_t = tl.program_id(0), tl.program_id(1)
    expert, begin, end = _find_tile(firsts, i_t, E, BM, BE)
    if begin < end:
        o_m, o_n, o_k = begin + tl.arange(0, BM), i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
        token = tl.load(order + o_m, mask=o_m < end, other=0) // TOP
        p_x = hidden + token.to(tl.int64)[:, None] * H + o_k[None, :]
        # Columns behind the last read the first one's weights and are not stored.
        row = expert.to(tl.int64) * 2 * F + tl.where(o_n < F, o_n, 0)
        p_g = gate_up + row[None, :] * H + o_k[:, None]
        p_u = gate_up + (row + F)[None, :] * H + o_k[:, None]
        b_g = tl.zeros([BM, BN], dtype=tl.float32)
        b_u = tl.zeros([BM, BN], dtype=tl.float32)
        for i_k in range(0, H, BK):
            m_k = o_k < H - i_k
            b_x = tl.load(p_x + i_k, mask=m_k[None, :], other=0.0)
            b_g = tl.dot(b_x, tl.load(p_g + i_k, mask=m_k[:, None], other=0.0), b_g, input_precision=PRECISION)
            b_u = tl.dot(b_x, tl.load(p_u + i_k, mask=m_k[:, None], other=0.0), b_u, input_precision=PRECISION)
        b_a = b_g * tl.sigmoid(b_g) * b_u
        p_a = activated + o_m.to(tl.int64)[:, None] * F + o_n[None, :]
        tl.store(p_a, b_a.to(activated.dtype.element_ty), mask=(o_m < end)[:, None] & (o_n < F)[None, :])


@triton.jit
def _down_kernel(
    activated, down, weights, order, firsts, parts, E, H, F,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`weight · down a` of one tile and block of columns, stored in the order of pairs."""
    i_n, i_t = tl.program_id(0), tl.program_id(1)
    expert, begin, end = _find_tile(firsts, i_t, E, BM, BE)
    if begin < end:
        o_m, o_n, o_k = begin + tl.arange(0, BM), i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
        pair = tl.load(order + o_m, mask=o_m < end, other=0)
        p_a = activated + tl.where(o_m < end, o_m, begin).to(tl.int64)[:, None] * F + o_k[None, :]
        row = expert.to(tl.int64) * H + tl.where(o_n < H, o_n, 0)
        p_d = down + row[None, :] * F + o_k[:, None]
        b_o = tl.zeros([BM, BN], dtype=tl.float32)
        for i_k in range(0, F, BK):
            m_k = o_k < F - i_k
            b_a = tl.load(p_a + i_k, mask=m_k[None, :], other=0.0)
            b_o = tl.dot(b_a, tl.load(p_d + i_k, mask=m_k[:, None], other=0.0), b_o, input_precision=PRECISION)
        b_o *= tl.load(weights + pair, mask=o_m < end, other=0.0)[:, None]
        p_o = parts + pair.to(tl.int64)[:, None] * H + o_n[None, :]
        tl.store(p_o, b_o.to(parts.dtype.element_ty), mask=(o_m < end)[:, None] & (o_n < H)[None, :])


@triton.jit
def _sum_kernel(
    parts, shared, shared_logits, residual, outputs, H, shared_stride, logit_stride, residual_stride,
    TOP: tl.constexpr, BH: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """One token and block of channels."""
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    b_o = tl.zeros([BH], dtype=tl.float32)
    for i_s in tl.static_range(TOP):
        b_o += tl.load(parts + (i_t * TOP + i_s) * H + o_h, mask=o_h < H, other=0.0).to(tl.float32)
    if SHARED:
        b_s = tl.load(shared + i_t * shared_stride + o_h, mask=o_h < H, other=0.0).to(tl.float32)
        if GATED:
            b_s *= tl.sigmoid(tl.load(shared_logits + i_t * logit_stride).to(tl.float32))
        b_o += b_s
    if ADDED:
        b_o += tl.load(residual + i_t * residual_stride + o_h, mask=o_h < H, other=0.0).to(tl.float32)
    tl.store(outputs + i_t * H + o_h, b_o.to(outputs.dtype.element_ty), mask=o_h < H)


@dataclass(frozen=True, slots=True)
class _Steps:
    """How a program of one product works: columns of weights that it holds, channels of a step, warps, and stages in flight."""

    columns: int
    channels: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class _Tiles:
    """rows of pairs in a tile; a tile of the first product has half its columns of each half."""

    rows: int
    gate_up: _Steps
    down: _Steps

    @classmethod
    def of(cls, pairs: int, experts: int, dtype: torch.dtype) -> "_Tiles":
        """Rows about as many as an expert has pairs, so that weights are read once and few rows stand empty.

        Few pairs make few programs, of which each has more loads under way.
        """
        rows = next((rows for rows, most in ((16, 12), (32, 28), (64, 72)) if pairs <= most * experts), 128)
        if dtype == torch.float32:
            steps = _Steps(64, 32, warps=4, stages=2)
            return cls(min(rows, 64), steps, steps)
        if rows == 16:
            return cls(rows, _Steps(64, 256, 2, 5 if pairs <= _FEW_PAIRS else 3), _Steps(64, 128, 2, 3))
        if rows == 128:
            return cls(rows, _Steps(256, 64, warps=8, stages=4), _Steps(256, 64, warps=8, stages=4))
        return cls(rows, _Steps(256, 64, warps=4, stages=4), _Steps(128, 64, warps=4, stages=3))

    def most(self, pairs: int, experts: int) -> int:
        """An upper bound on the number of tiles, whatever was chosen."""
        return pairs // self.rows + min(experts, pairs)


@dataclass(frozen=True, slots=True)
class _Order:
    """pairs `[P]` sorted by expert, of one expert in their own order; firsts `[E + 1]`: where every expert's begin. int32."""

    pairs: torch.Tensor
    firsts: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, num_experts: int) -> "_Order":
        """The order of experts `[N, k]`."""
        # The first choices of several are every k-th number: flat, but not next to each other.
        flat = experts.flatten().contiguous()
        return cls._of_few(flat, num_experts) if len(flat) <= _MOST_PAIRS_READ else cls._of_many(flat, num_experts)

    @classmethod
    def _of_few(cls, flat: torch.Tensor, num_experts: int) -> "_Order":
        pairs = torch.empty(len(flat), dtype=torch.int32, device=flat.device)
        firsts = torch.empty(num_experts + 1, dtype=torch.int32, device=flat.device)
        block = min(1024, max(16, triton.next_power_of_2(len(flat))))
        _order_kernel[(num_experts,)](
            flat, pairs, firsts, len(flat), num_experts, BP=block, num_warps=1 if block < 256 else 4
        )
        return cls(pairs, firsts)

    @classmethod
    def _of_many(cls, flat: torch.Tensor, num_experts: int) -> "_Order":
        pairs = torch.empty(len(flat), dtype=torch.int32, device=flat.device)
        blocks = triton.cdiv(len(flat), _BLOCK_PAIRS)
        counts = torch.empty(1 + num_experts * blocks, dtype=torch.int32, device=flat.device)
        columns = max(32, triton.next_power_of_2(num_experts + 1))
        _count_kernel[(blocks,)](flat, counts, len(flat), num_experts, BP=_BLOCK_PAIRS, BE=columns, num_warps=4)
        starts = counts.cumsum(0, dtype=torch.int32)
        _place_kernel[(blocks,)](flat, starts, pairs, len(flat), BP=_BLOCK_PAIRS, BJ=32, num_warps=4)
        return cls(pairs, starts[::blocks].contiguous())


def feed_forward(
    hidden: torch.Tensor,
    choice: Choice,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: SharedTerm | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `naive.feed_forward`, on a GPU: bf16, fp16 or fp32 as hidden and weights are, sums in fp32.

    Raises:
        ValueError: weights of another dtype, or not contiguous.
    """
    if {gate_up.dtype, down.dtype} != {hidden.dtype} or not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError(f"gate_up and down must be contiguous and of the hidden states' dtype, {hidden.dtype}")
    (tokens, channels), top = hidden.shape, choice.experts.shape[1]
    num_experts, _, size = down.shape
    order = _Order.of(choice.experts, num_experts)
    tiles = _Tiles.of(tokens * top, num_experts, hidden.dtype)
    most = tiles.most(tokens * top, num_experts)
    activated = hidden.new_empty(tokens * top, size)
    parts = hidden.new_empty(tokens * top, channels)
    shape = {"BM": tiles.rows, "BE": max(16, triton.next_power_of_2(num_experts)), "PRECISION": "tf32x3"}
    _gate_up_kernel[(triton.cdiv(size, tiles.gate_up.columns // 2), most)](
        hidden.contiguous(), gate_up, order.pairs, order.firsts, activated, num_experts, channels, size,
        TOP=top, BN=tiles.gate_up.columns // 2, BK=tiles.gate_up.channels, **shape,
        num_warps=tiles.gate_up.warps, num_stages=tiles.gate_up.stages,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(channels, tiles.down.columns), most)](
        activated, down, choice.weights.contiguous(), order.pairs, order.firsts, parts, num_experts, channels, size,
        BN=tiles.down.columns, BK=tiles.down.channels, **shape,
        num_warps=tiles.down.warps, num_stages=tiles.down.stages,
    )  # fmt: skip
    return _sum(parts.view(tokens, top, channels), shared, residual)


def _sum(parts: torch.Tensor, shared: SharedTerm | None, residual: torch.Tensor | None) -> torch.Tensor:
    """Parts `[N, k, H]`, the shared term and the residual, to `[N, H]` in the parts' dtype."""
    tokens, top, channels = parts.shape
    outputs = parts.new_empty(tokens, channels)
    # A kernel reads no more of these than its constants allow.
    added, logits = parts, parts
    if shared is not None:
        added = shared.outputs if shared.outputs.stride(1) == 1 else shared.outputs.contiguous()
        logits = added if shared.logits is None else shared.logits
    base = outputs if residual is None else residual
    if base.stride(1) != 1:
        base = base.contiguous()
    _sum_kernel[(tokens, triton.cdiv(channels, _SUM_CHANNELS))](
        parts, added, logits, base, outputs, channels, added.stride(0), logits.stride(0), base.stride(0),
        TOP=top, BH=_SUM_CHANNELS, SHARED=shared is not None, GATED=shared is not None and shared.logits is not None,
        ADDED=residual is not None, num_warps=4,
    )  # fmt: skip
    return outputs
