"""Products of queries and keys inside chunks on a GPU, with their decays, and the inverses of a delta rule's systems.

Each kernel keeps little enough in registers that nothing spills: products go over slices of the key channels, the unit lower
triangular inverse over blocks of 16 rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.ops.recurrence.cuts import Tiling
from services.worker.ops.recurrence.types import RecurrenceInputs
from services.worker.ops.tiles import block

__all__ = ["Gated", "multiply"]


@triton.jit
def _products_kernel(
    q, k, log_decay, beta, starts, ends,
    scores, erasures, enters, rests, decays,
    H: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, REPEATS: tl.constexpr, ERASES: tl.constexpr,
):  # fmt: skip
    """One chunk of one key head with one decay a token; chunk rows behind the run's end count as tokens that do nothing.

    Log decays are summed in fp64: in fp32 the difference of two long sums would lose a slow gate beside one that forgets at
    once.
    """
    i_m, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    if start >= end:
        return
    o_l, o_k = tl.arange(0, L), tl.arange(0, BK)
    m_t = start + o_l < end
    Hk: tl.constexpr = H // REPEATS
    p_k = o_l[:, None] * (Hk * K) + o_k[None, :]
    key = (start * Hk + i_g) * K
    b_s = tl.zeros([L, L], dtype=tl.float32)
    b_a = tl.zeros([L, L], dtype=tl.float32)
    for i_k in range(0, K, BK):
        m_k = m_t[:, None] & (i_k + o_k < K)[None, :]
        b_k = tl.load(k + key + i_k + p_k, mask=m_k, other=0.0)
        b_q = tl.load(q + key + i_k + p_k, mask=m_k, other=0.0)
        b_s += tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3")
        if ERASES:
            b_a += tl.dot(b_k, tl.trans(b_k), input_precision="tf32x3")
    for i_r in range(REPEATS):
        row = start * H + i_g * REPEATS + i_r
        p_t, p_s = o_l * H, o_l[:, None] * (H * L) + o_l[None, :]
        b_x = tl.load(log_decay + row + p_t, mask=m_t, other=0.0).to(tl.float64)
        b_c, b_e = tl.cumsum(b_x, axis=0), tl.sum(b_x, axis=0)
        tl.store(enters + row + p_t, tl.exp(b_c.to(tl.float32)), mask=m_t)
        tl.store(rests + row + p_t, tl.exp((b_e - b_c).to(tl.float32)), mask=m_t)
        tl.store(decays + i_m * H + i_g * REPEATS + i_r, tl.exp(b_e.to(tl.float32)))
        b_n = tl.exp(tl.minimum(b_c[:, None] - b_c[None, :], 0.0).to(tl.float32))
        b_y = tl.where(o_l[:, None] >= o_l[None, :], b_s * b_n, 0.0)
        tl.store(scores + row * L + p_s, b_y.to(scores.dtype.element_ty), mask=m_t[:, None])
        if ERASES:
            b_b = tl.load(beta + row + p_t, mask=m_t, other=0.0)[:, None]
            below = o_l[:, None] > o_l[None, :]
            tl.store(erasures + row * L + p_s, b_a * b_n * b_b, mask=m_t[:, None] & below)


@triton.jit
def _channel_products_kernel(
    q, k, log_decay, beta, starts, ends,
    queries, entering, writers, scores, erasures, decays,
    H: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, ERASES: tl.constexpr,
):  # fmt: skip
    """As `_products_kernel`, with a decay of every key channel, which stands in queries, entering keys and writers."""
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    if start >= end:
        return
    o_l, o_k = tl.arange(0, L), tl.arange(0, BK)
    row = start * H + i_h
    m_t = start + o_l < end
    last = tl.minimum(end - start, L) - 1
    m_k = m_t[:, None] & (o_k < K)[None, :]
    p_k = row * K + o_l[:, None] * (H * K) + o_k[None, :]
    b_q = tl.load(q + p_k, mask=m_k, other=0.0)
    b_k = tl.load(k + p_k, mask=m_k, other=0.0)
    b_x = tl.load(log_decay + p_k, mask=m_k, other=0.0)
    b_s = tl.zeros([L, L], dtype=tl.float32)
    b_a = tl.zeros([L, L], dtype=tl.float32)
    b_r = tl.zeros([L, BK], dtype=tl.float32)
    for j in range(L):
        b_p = tl.cumsum(tl.where((o_l > j)[:, None], b_x, 0.0), axis=0)
        b_kj = tl.sum(tl.where((o_l == j)[:, None], b_k, 0.0), axis=0)
        reach = tl.where((o_l >= j)[:, None], tl.exp(b_p) * b_kj[None, :], 0.0)
        column = (o_l == j)[None, :]
        b_s = tl.where(column, tl.sum(b_q * reach, axis=1)[:, None], b_s)
        b_a = tl.where(column, tl.sum(b_k * reach, axis=1)[:, None], b_a)
        rest = tl.sum(tl.where((o_l == last)[:, None], b_p, 0.0), axis=0)
        b_r = tl.where((o_l == j)[:, None], rest[None, :], b_r)
    tl.store(decays + (i_m * H + i_h) * K + o_k, tl.exp(tl.sum(b_x, axis=0)), mask=o_k < K)
    b_e = tl.exp(tl.cumsum(b_x, axis=0))
    tl.store(queries + p_k, b_q * b_e, mask=m_k)
    tl.store(entering + p_k, b_k * b_e, mask=m_k)
    tl.store(writers + p_k, b_k * tl.exp(b_r), mask=m_k)
    p_s = row * L + o_l[:, None] * (H * L) + o_l[None, :]
    tl.store(scores + p_s, b_s, mask=m_t[:, None])
    if ERASES:
        b_b = tl.load(beta + row + o_l * H, mask=m_t, other=0.0)[:, None]
        tl.store(erasures + p_s, b_a * b_b, mask=m_t[:, None] & (o_l[:, None] > o_l[None, :]))


@triton.jit
def _tile(base, first_row, first_column, rows, stride):
    """A 16 x 16 tile of a matrix in memory; rows from `rows` on are zero."""
    o_b = tl.arange(0, 16)
    m_b = (first_row + o_b < rows)[:, None]
    return tl.load(base + (first_row + o_b)[:, None] * stride + first_column + o_b[None, :], mask=m_b, other=0.0)


@triton.jit
def _put_tile(base, first_row, first_column, rows, stride, b_x, beta, low, H: tl.constexpr, SPLIT: tl.constexpr):
    """SPLIT: times `β` of its columns, as a sum of two in bf16, the second `low` numbers behind the first."""
    o_b = tl.arange(0, 16)
    m_b = (first_row + o_b < rows)[:, None]
    place = base + (first_row + o_b)[:, None] * stride + first_column + o_b[None, :]
    if SPLIT:
        b_x *= tl.load(beta + (first_column + o_b) * H, mask=first_column + o_b < rows, other=0.0)[None, :]
        b_y = b_x.to(tl.bfloat16)
        tl.store(place, b_y, mask=m_b)
        tl.store(place + low, (b_x - b_y.to(tl.float32)).to(tl.bfloat16), mask=m_b)
    else:
        tl.store(place, b_x, mask=m_b)


@triton.jit
def _eliminate(b_i, base, first, i, rows, stride):
    """Row `i` of `(I + A)⁻¹ − I` of the diagonal tile at `first`, from the rows above it."""
    o_b = tl.arange(0, 16)
    b_r = -tl.load(base + (first + i) * stride + first + o_b, mask=(o_b < i) & (first + i < rows), other=0.0)
    b_r += tl.sum(b_r[:, None] * b_i, axis=0)
    return tl.where((o_b == i)[:, None], b_r[None, :], b_i)


@triton.jit
def _times(b_x, b_y):
    return tl.dot(b_x, b_y, input_precision="tf32x3")


@triton.jit
def _invert_kernel(
    erasures, inverses, beta, starts, ends, low,
    H: tl.constexpr, L: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """`(I + A)⁻¹` of a strictly lower triangular `A` `[L, L]`, L 16 or 64, which may stand in the same place. See `_put_tile`.

    Diagonal tiles row by row, the others by forward substitution over tiles; a series of powers of `A` would cancel.
    """
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    if start >= end:
        return
    rows = tl.minimum(end - start, L)
    base, target = erasures + (start * H + i_h) * L, inverses + (start * H + i_h) * L
    stride = H * L
    beta += start * H + i_h
    o_b = tl.arange(0, 16)
    unit = (o_b[:, None] == o_b[None, :]).to(tl.float32)
    b_00 = tl.zeros([16, 16], dtype=tl.float32)
    b_11 = tl.zeros([16, 16], dtype=tl.float32)
    b_22 = tl.zeros([16, 16], dtype=tl.float32)
    b_33 = tl.zeros([16, 16], dtype=tl.float32)
    for i in range(1, 16):
        b_00 = _eliminate(b_00, base, 0, i, rows, stride)
        if L == 64:
            b_11 = _eliminate(b_11, base, 16, i, rows, stride)
            b_22 = _eliminate(b_22, base, 32, i, rows, stride)
            b_33 = _eliminate(b_33, base, 48, i, rows, stride)
    b_00 += unit
    if L == 64:
        b_11 += unit
        b_22 += unit
        b_33 += unit
        a_10 = _tile(base, 16, 0, rows, stride)
        a_20, a_21 = _tile(base, 32, 0, rows, stride), _tile(base, 32, 16, rows, stride)
        a_30, a_31 = _tile(base, 48, 0, rows, stride), _tile(base, 48, 16, rows, stride)
        a_32 = _tile(base, 48, 32, rows, stride)
        b_10 = -_times(b_11, _times(a_10, b_00))
        b_20 = -_times(b_22, _times(a_20, b_00) + _times(a_21, b_10))
        b_30 = -_times(b_33, _times(a_30, b_00) + _times(a_31, b_10) + _times(a_32, b_20))
        b_21 = -_times(b_22, _times(a_21, b_11))
        b_31 = -_times(b_33, _times(a_31, b_11) + _times(a_32, b_21))
        b_32 = -_times(b_33, _times(a_32, b_22))
        # All tiles are read before the first is written over.
        tl.debug_barrier()
        _put_tile(target, 16, 0, rows, stride, b_10, beta, low, H, SPLIT)
        _put_tile(target, 16, 16, rows, stride, b_11, beta, low, H, SPLIT)
        _put_tile(target, 32, 0, rows, stride, b_20, beta, low, H, SPLIT)
        _put_tile(target, 32, 16, rows, stride, b_21, beta, low, H, SPLIT)
        _put_tile(target, 32, 32, rows, stride, b_22, beta, low, H, SPLIT)
        _put_tile(target, 48, 0, rows, stride, b_30, beta, low, H, SPLIT)
        _put_tile(target, 48, 16, rows, stride, b_31, beta, low, H, SPLIT)
        _put_tile(target, 48, 32, rows, stride, b_32, beta, low, H, SPLIT)
        _put_tile(target, 48, 48, rows, stride, b_33, beta, low, H, SPLIT)
        nothing = tl.zeros([16, 16], dtype=tl.float32)
        for i_r in tl.static_range(3):
            for i_c in tl.static_range(i_r + 1, 4):
                _put_tile(target, 16 * i_r, 16 * i_c, rows, stride, nothing, beta, low, H, SPLIT)
    else:
        tl.debug_barrier()
    _put_tile(target, 0, 0, rows, stride, b_00, beta, low, H, SPLIT)


@dataclass(frozen=True, slots=True)
class Gated:
    """What products leave, fp32: scores and inverses `[N, H, L]`; decays as `Chunks` has them.

    enters, rests `[N, H]`: `e^G` and `e^(G_L − G)`. Of a decay of every channel they stand in queries, keys that enter, and
    writers, `[N, H, K]`; else these are what came in. For `triton_stream` scores are bf16, and inverses times `β` of their
    columns, as a sum of two in bf16, `[2, N, H, L]`.
    """

    scores: torch.Tensor
    inverses: torch.Tensor
    decays: torch.Tensor
    enters: torch.Tensor
    rests: torch.Tensor
    queries: torch.Tensor
    entering: torch.Tensor
    writers: torch.Tensor


def multiply(inputs: RecurrenceInputs, tiling: Tiling, in_bf16: bool = False) -> Gated:
    """Products of queries and keys, and inverses where there are erasures; in_bf16: for `triton_stream`."""
    (tokens, heads, _), key_dim = inputs.v.shape, inputs.k.shape[-1]
    device, every_channel = inputs.v.device, inputs.log_decay.ndim == 3
    erasures = torch.empty(tokens, heads, tiling.length, device=device)
    scores = torch.empty_like(erasures, dtype=torch.bfloat16 if in_bf16 else None)
    inverses = scores.new_empty(2, *scores.shape) if in_bf16 else erasures
    gates = torch.empty(2, tokens, heads, device=device)
    scaled = [torch.empty(tokens, heads, key_dim, device=device) for _ in range(3)] if every_channel else None
    gated = Gated(
        scores=scores,
        inverses=inverses,
        decays=torch.empty(max(1, tiling.num_chunks), *inputs.log_decay.shape[1:], device=device),
        enters=gates[0],
        rests=gates[1],
        queries=inputs.q if scaled is None else scaled[0],
        entering=inputs.k if scaled is None else scaled[1],
        writers=inputs.k if scaled is None else scaled[2],
    )
    if tiling.num_chunks:
        _launch(inputs, tiling, gated, erasures, in_bf16)
    return gated


def _launch(inputs: RecurrenceInputs, tiling: Tiling, gated: Gated, erasures: torch.Tensor, in_bf16: bool) -> None:
    heads, key_dim, erases = inputs.v.shape[1], inputs.k.shape[-1], inputs.beta is not None
    beta = inputs.log_decay if inputs.beta is None else inputs.beta
    grid = (tiling.num_chunks, heads)
    if inputs.log_decay.ndim == 3:
        _channel_products_kernel[grid](
            inputs.q, inputs.k, inputs.log_decay, beta, tiling.starts, tiling.ends,
            gated.queries, gated.entering, gated.writers, gated.scores, erasures, gated.decays,
            H=heads, K=key_dim, L=tiling.length, BK=block(key_dim), ERASES=erases,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    else:
        _products_kernel[tiling.num_chunks, inputs.k.shape[1]](
            inputs.q, inputs.k, inputs.log_decay, beta, tiling.starts, tiling.ends,
            gated.scores, erasures, gated.enters, gated.rests, gated.decays,
            H=heads, K=key_dim, L=tiling.length, BK=min(32 if inputs.k.dtype == torch.float32 else 128, block(key_dim)),
            REPEATS=inputs.repeats, ERASES=erases, num_warps=4, num_stages=2,
        )  # fmt: skip
    if erases:
        _invert_kernel[grid](
            erasures, gated.inverses, beta, tiling.starts, tiling.ends, erasures.numel(),
            H=heads, L=tiling.length, SPLIT=in_bf16, num_warps=1,
        )  # fmt: skip
