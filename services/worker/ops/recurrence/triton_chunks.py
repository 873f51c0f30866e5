"""What the recurrence's chunks need no state for, on a GPU: one launch for products, two for the delta rule's systems.

`chunks.py` has the algebra. Each kernel keeps little enough in registers that nothing spills: products go over slices of
the key channels, the unit lower triangular inverse over blocks of 16 rows, right sides over slices of columns. Dots are fp32 in
three tf32 passes: plain tf32 is off by 3e-4 in a transition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl

from services.worker.ops.recurrence.types import RecurrenceInputs

__all__ = ["Chunks", "Tiling", "block", "prepare", "send", "tile"]

CHUNK_TOKENS = 64
CHANNEL_CHUNK_TOKENS = 16


@triton.jit
def _products_kernel(
    q, k, log_decay, beta, starts, ends,
    scores, erasures, enters, rests, decays,
    H: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, ERASES: tl.constexpr,
):  # fmt: skip
    """One chunk of one head with one decay a token; chunk rows behind the run's end count as tokens that do nothing.

    Log decays between two tokens are summed, not subtracted: the difference of two long sums loses a slow gate beside one
    that forgets at once.
    """
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    o_l, o_k = tl.arange(0, L), tl.arange(0, BK)
    row = start * H + i_h
    m_t = start + o_l < end
    p_t = row + o_l * H
    p_k = row * K + o_l[:, None] * (H * K) + o_k[None, :]
    b_s = tl.zeros([L, L], dtype=tl.float32)
    b_a = tl.zeros([L, L], dtype=tl.float32)
    for i_k in range(0, K, BK):
        m_k = m_t[:, None] & (i_k + o_k < K)[None, :]
        b_k = tl.load(k + p_k + i_k, mask=m_k, other=0.0)
        b_s += tl.dot(tl.load(q + p_k + i_k, mask=m_k, other=0.0), tl.trans(b_k), input_precision="tf32x3")
        if ERASES:
            b_a += tl.dot(b_k, tl.trans(b_k), input_precision="tf32x3")
    b_x = tl.load(log_decay + p_t, mask=m_t, other=0.0)
    later = tl.load(log_decay + p_t + H, mask=(start + o_l + 1 < end) & (o_l + 1 < L), other=0.0)
    tl.store(enters + p_t, tl.exp(tl.cumsum(b_x, axis=0)), mask=m_t)
    tl.store(rests + p_t, tl.exp(tl.cumsum(later, axis=0, reverse=True)), mask=m_t)
    tl.store(decays + i_m * H + i_h, tl.exp(tl.sum(b_x, axis=0)))
    b_p = tl.cumsum(tl.where(o_l[:, None] > o_l[None, :], b_x[:, None], 0.0), axis=0)
    near = tl.where(o_l[:, None] >= o_l[None, :], tl.exp(b_p), 0.0)
    p_s = row * L + o_l[:, None] * (H * L) + o_l[None, :]
    tl.store(scores + p_s, b_s * near, mask=m_t[:, None])
    if ERASES:
        b_b = tl.load(beta + p_t, mask=m_t, other=0.0)[:, None]
        below = o_l[:, None] > o_l[None, :]
        tl.store(erasures + p_s, tl.where(below, b_a * near * b_b, 0.0), mask=m_t[:, None])


@triton.jit
def _channel_products_kernel(
    q, k, log_decay, beta, starts, ends,
    queries, writers, scores, erasures, decays,
    H: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, ERASES: tl.constexpr,
):  # fmt: skip
    """As `_products_kernel`, with a decay of every key channel, which enters queries and writers."""
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
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
    tl.store(queries + p_k, b_q * tl.exp(tl.cumsum(b_x, axis=0)), mask=m_k)
    tl.store(writers + p_k, b_k * tl.exp(b_r), mask=m_k)
    p_s = row * L + o_l[:, None] * (H * L) + o_l[None, :]
    tl.store(scores + p_s, b_s, mask=m_t[:, None])
    if ERASES:
        b_b = tl.load(beta + row + o_l * H, mask=m_t, other=0.0)[:, None]
        tl.store(erasures + p_s, tl.where(o_l[:, None] > o_l[None, :], b_a * b_b, 0.0), mask=m_t[:, None])


@triton.jit
def _tile(base, first_row, first_column, rows, stride):
    """A 16 x 16 tile of a matrix in memory; rows from `rows` on are zero."""
    o_b = tl.arange(0, 16)
    m_b = (first_row + o_b < rows)[:, None]
    return tl.load(base + (first_row + o_b)[:, None] * stride + first_column + o_b[None, :], mask=m_b, other=0.0)


@triton.jit
def _put_tile(base, first_row, first_column, rows, stride, b_x):
    o_b = tl.arange(0, 16)
    m_b = (first_row + o_b < rows)[:, None]
    tl.store(base + (first_row + o_b)[:, None] * stride + first_column + o_b[None, :], b_x, mask=m_b)


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
    erasures, starts, ends,
    H: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """`(I + A)⁻¹` in the place of a strictly lower triangular `A` `[L, L]`, L 16 or 64.

    Diagonal tiles row by row, the others by forward substitution over tiles; a series of powers of `A` would cancel.
    """
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    rows = tl.minimum(end - start, L)
    base = erasures + (start * H + i_h) * L
    stride = H * L
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
        _put_tile(base, 16, 0, rows, stride, b_10)
        _put_tile(base, 16, 16, rows, stride, b_11)
        _put_tile(base, 32, 0, rows, stride, b_20)
        _put_tile(base, 32, 16, rows, stride, b_21)
        _put_tile(base, 32, 32, rows, stride, b_22)
        _put_tile(base, 48, 0, rows, stride, b_30)
        _put_tile(base, 48, 16, rows, stride, b_31)
        _put_tile(base, 48, 32, rows, stride, b_32)
        _put_tile(base, 48, 48, rows, stride, b_33)
    else:
        tl.debug_barrier()
    _put_tile(base, 0, 0, rows, stride, b_00)


@triton.jit
def _solve_kernel(
    k, v, log_decay, enters, beta, inverses, starts, ends,
    readers, values, num_key_slices,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BC: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A slice of columns of the readers of one chunk and head, or of its values behind them: the inverse times right sides."""
    i_c, i_m, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    o_l = tl.arange(0, L)
    row = start * H + i_h
    m_t = start + o_l < end
    p_t = row + o_l * H
    b_i = tl.load(inverses + row * L + o_l[:, None] * (H * L) + o_l[None, :], mask=m_t[:, None], other=0.0)
    b_b = tl.load(beta + p_t, mask=m_t, other=0.0)[:, None]
    if i_c < num_key_slices:
        o_c = i_c * BC + tl.arange(0, BC)
        m_c = m_t[:, None] & (o_c < K)[None, :]
        p_c = row * K + o_l[:, None] * (H * K) + o_c[None, :]
        if CHANNELS:
            b_e = tl.exp(tl.cumsum(tl.load(log_decay + p_c, mask=m_c, other=0.0), axis=0))
        else:
            b_e = tl.load(enters + p_t, mask=m_t, other=0.0)[:, None]
        b_x = tl.load(k + p_c, mask=m_c, other=0.0) * b_e * b_b
        tl.store(readers + p_c, _times(b_i, b_x), mask=m_c)
    else:
        o_c = (i_c - num_key_slices) * BC + tl.arange(0, BC)
        m_c = m_t[:, None] & (o_c < V)[None, :]
        p_c = row * V + o_l[:, None] * (H * V) + o_c[None, :]
        b_x = tl.load(v + p_c, mask=m_c, other=0.0) * b_b
        tl.store(values + p_c, _times(b_i, b_x), mask=m_c)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Runs cut into chunks from their first token on.

    starts, ends: int32 `[M]` on the device, the first token of every chunk and the end of its run; first: index of every
    run's first chunk, `[R + 1]`; cu_runs: its tokens; length: tokens of a full chunk.
    """

    starts: torch.Tensor
    ends: torch.Tensor
    first: tuple[int, ...]
    cu_runs: tuple[int, ...]
    length: int

    @property
    def num_chunks(self) -> int:
        """M."""
        return self.first[-1]

    def chunks_of(self, run: int) -> range:
        """The indices of a run's chunks."""
        return range(self.first[run], self.first[run + 1])

    def tokens_of(self, run: int) -> range:
        """A run's packed tokens."""
        return range(self.cu_runs[run], self.cu_runs[run + 1])


@dataclass(frozen=True, slots=True)
class Chunks:
    """What needs no state, as `chunks.Chunks` has it, packed by token.

    enters, rests: `e^G` and `e^(G_L − G)` `[N, H]`, which are left out of queries and writers; of a decay of every channel
    they are part of them.
    """

    tiling: Tiling
    queries: torch.Tensor
    writers: torch.Tensor
    readers: torch.Tensor
    values: torch.Tensor
    scores: torch.Tensor
    enters: torch.Tensor
    rests: torch.Tensor
    decays: torch.Tensor


def block(channels: int) -> int:
    """The smallest tile that holds all channels."""
    return max(16, triton.next_power_of_2(channels))


def send(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on the device, without waiting for what it does at the moment."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def tile(inputs: RecurrenceInputs, cu_runs: Sequence[int]) -> Tiling:
    """Runs of the packed inputs, cut."""
    length = CHUNK_TOKENS if inputs.log_decay.ndim == 2 else CHANNEL_CHUNK_TOKENS
    starts: list[int] = []
    ends: list[int] = []
    first = [0]
    for begin, end in pairwise(cu_runs):
        starts += range(begin, end, length)
        ends += [end] * (len(starts) - first[-1])
        first.append(len(starts))
    both = send([*starts, *ends], torch.int32, inputs.q.device)
    return Tiling(both[: len(starts)], both[len(starts) :], tuple(first), tuple(cu_runs), length)


def prepare(inputs: RecurrenceInputs, tiling: Tiling) -> Chunks:
    """Chunks of contiguous inputs."""
    every_channel, erases = inputs.log_decay.ndim == 3, inputs.beta is not None
    gates = inputs.q.new_empty(2, *inputs.q.shape[:2])
    chunks = Chunks(
        tiling=tiling,
        queries=torch.empty_like(inputs.q) if every_channel else inputs.q,
        writers=torch.empty_like(inputs.k) if every_channel else inputs.k,
        readers=torch.empty_like(inputs.k) if erases else inputs.k,
        values=torch.empty_like(inputs.v) if erases else inputs.v,
        scores=inputs.q.new_empty(*inputs.q.shape[:2], tiling.length),
        enters=gates[0],
        rests=gates[1],
        decays=inputs.q.new_empty(tiling.num_chunks, *inputs.log_decay.shape[1:]),
    )
    if tiling.num_chunks:
        _fill(inputs, chunks)
    return chunks


def _fill(inputs: RecurrenceInputs, chunks: Chunks) -> None:
    tiling, (heads, key_dim) = chunks.tiling, inputs.q.shape[1:]
    erasures = chunks.scores if inputs.beta is None else torch.empty_like(chunks.scores)
    beta = inputs.q if inputs.beta is None else inputs.beta
    grid = (tiling.num_chunks, heads)
    if inputs.log_decay.ndim == 3:
        _channel_products_kernel[grid](
            inputs.q, inputs.k, inputs.log_decay, beta, tiling.starts, tiling.ends,
            chunks.queries, chunks.writers, chunks.scores, erasures, chunks.decays,
            H=heads, K=key_dim, L=tiling.length, BK=block(key_dim), ERASES=inputs.beta is not None,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    else:
        _products_kernel[grid](
            inputs.q, inputs.k, inputs.log_decay, beta, tiling.starts, tiling.ends,
            chunks.scores, erasures, chunks.enters, chunks.rests, chunks.decays,
            H=heads, K=key_dim, L=tiling.length, BK=min(32, block(key_dim)), ERASES=inputs.beta is not None,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    if inputs.beta is not None:
        _invert_kernel[grid](erasures, tiling.starts, tiling.ends, H=heads, L=tiling.length, num_warps=1)
        _solve(inputs, chunks, erasures)


def _solve(inputs: RecurrenceInputs, chunks: Chunks, inverses: torch.Tensor) -> None:
    tiling, (heads, key_dim), value_dim = chunks.tiling, inputs.k.shape[1:], inputs.v.shape[-1]
    columns = min(64, block(max(key_dim, value_dim)))
    key_slices, value_slices = triton.cdiv(key_dim, columns), triton.cdiv(value_dim, columns)
    _solve_kernel[(key_slices + value_slices, tiling.num_chunks, heads)](
        inputs.k, inputs.v, inputs.log_decay, chunks.enters, inputs.beta, inverses, tiling.starts, tiling.ends,
        chunks.readers, chunks.values, key_slices,
        H=heads, K=key_dim, V=value_dim, L=tiling.length, BC=columns, CHANNELS=inputs.log_decay.ndim == 3,
        num_warps=4, num_stages=1,
    )  # fmt: skip
