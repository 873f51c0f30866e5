"""What the recurrence's chunks need no state for, on a GPU: what every chunk does to a state, and what it reads out of one.

A chunk maps the state before it to `W · state + U`, and its outputs are `Q · state + O` (`chunks.py` has the algebra: with its
names `W = decay − writers · readers`, `U = writers · values`, `Q = queries − scores · readers`, `O = scores · values`). Where
nothing is erased `W` is the decay alone, and `Q` the queries. A fold goes over slices of columns of all four.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.ops.recurrence.cuts import TILE, Tiling, dot_precision
from services.worker.ops.recurrence.triton_products import Gated, multiply
from services.worker.ops.recurrence.types import RecurrenceInputs
from services.worker.ops.tiles import block

__all__ = ["Chunks", "prepare"]


@triton.jit
def _write(
    b_x, k, rests, p_k, row, m_t, target, i_m, i_h, o_c, width, diagonal,
    H: tl.constexpr, K: tl.constexpr, Hk: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    CHANNELS: tl.constexpr, OF_TRANSITION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`writers · x` of columns `[L, BC]`, stored as columns of `U`; of `W`: taken from the decay on the diagonal."""
    o_l, o_k = tl.arange(0, L), tl.arange(0, BK)
    for i_k in tl.static_range(0, K, BK):
        o_r = i_k + o_k
        m_r = o_r < K
        b_w = tl.load(k + p_k + o_l[:, None] * (Hk * K) + o_r[None, :], mask=m_t[:, None] & m_r[None, :], other=0.0)
        b_w = b_w.to(tl.float32)
        if not CHANNELS:
            b_w *= tl.load(rests + row + o_l * H, mask=m_t, other=0.0)[:, None]
        b_y = tl.dot(tl.trans(b_w), b_x, input_precision=PRECISION)
        if OF_TRANSITION:
            p_d = diagonal + (i_m * H + i_h) * K + o_r if CHANNELS else diagonal + (i_m * H + i_h) + 0 * o_r
            b_d = tl.load(p_d, mask=m_r, other=0.0)
            b_y = tl.where(o_r[:, None] == o_c[None, :], b_d[:, None], 0.0) - b_y
        p_y = (i_m * H + i_h) * K * width + o_r[:, None] * width + o_c[None, :]
        tl.store(target + p_y, b_y, mask=m_r[:, None] & (o_c < width)[None, :])


@triton.jit
def _square(base, row, m_t, H: tl.constexpr, L: tl.constexpr):
    """Scores or inverses of one chunk and head, `[L, L]`."""
    o_l = tl.arange(0, L)
    return tl.load(base + row * L + o_l[:, None] * (H * L) + o_l[None, :], mask=m_t[:, None], other=0.0)


@triton.jit
def _fold_keys(
    q, k, beta, enters, rests, decays, scores, inverses, queries, entering, writers, transitions,
    i_c, i_m, i_h, start, m_t,
    H: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    REPEATS: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A slice of columns of `W`, then of `Q`."""
    Hk: tl.constexpr = H // REPEATS
    o_l, o_c = tl.arange(0, L), i_c * BC + tl.arange(0, BC)
    row, p_k = start * H + i_h, (start * Hk + i_h // REPEATS) * K
    m_c = m_t[:, None] & (o_c < K)[None, :]
    p_c = p_k + o_l[:, None] * (Hk * K) + o_c[None, :]
    p_q = row * K + o_l[:, None] * (H * K) + o_c[None, :]
    if CHANNELS:
        b_x = tl.load(entering + p_q, mask=m_c, other=0.0)
    else:
        b_x = tl.load(k + p_c, mask=m_c, other=0.0).to(tl.float32)
        b_x *= tl.load(enters + row + o_l * H, mask=m_t, other=0.0)[:, None]
    b_x *= tl.load(beta + row + o_l * H, mask=m_t, other=0.0)[:, None]
    b_r = tl.dot(_square(inverses, row, m_t, H, L), b_x, input_precision=PRECISION)
    _write(
        b_r, writers, rests, p_k, row, m_t, transitions, i_m, i_h, o_c, K, decays,
        H, K, Hk, L, BK, CHANNELS, True, PRECISION,
    )  # fmt: skip
    if CHANNELS:
        b_q = tl.load(queries + p_q, mask=m_c, other=0.0)
    else:
        b_q = tl.load(q + p_c, mask=m_c, other=0.0).to(tl.float32)
        b_q *= tl.load(enters + row + o_l * H, mask=m_t, other=0.0)[:, None]
    b_q -= tl.dot(_square(scores, row, m_t, H, L), b_r, input_precision=PRECISION)
    tl.store(queries + p_q, b_q, mask=m_c)


@triton.jit
def _fold_values(
    v, beta, rests, decays, scores, inverses, outputs, writers, end_states,
    i_c, i_m, i_h, start, m_t,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    REPEATS: tl.constexpr, ERASES: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A slice of columns of `U`, then of `O`."""
    Hk: tl.constexpr = H // REPEATS
    o_l, o_c = tl.arange(0, L), i_c * BC + tl.arange(0, BC)
    row, p_k = start * H + i_h, (start * Hk + i_h // REPEATS) * K
    m_c = m_t[:, None] & (o_c < V)[None, :]
    p_v = row * V + o_l[:, None] * (H * V) + o_c[None, :]
    b_u = tl.load(v + p_v, mask=m_c, other=0.0).to(tl.float32)
    if ERASES:
        b_u *= tl.load(beta + row + o_l * H, mask=m_t, other=0.0)[:, None]
        b_u = tl.dot(_square(inverses, row, m_t, H, L), b_u, input_precision=PRECISION)
    _write(
        b_u, writers, rests, p_k, row, m_t, end_states, i_m, i_h, o_c, V, decays,
        H, K, Hk, L, BK, CHANNELS, False, PRECISION,
    )  # fmt: skip
    tl.store(outputs + p_v, tl.dot(_square(scores, row, m_t, H, L), b_u, input_precision=PRECISION), mask=m_c)


@triton.jit
def _fold_kernel(
    q, k, v, beta, enters, rests, decays, scores, inverses, starts, ends,
    queries, entering, writers, transitions, end_states, outputs, num_key_slices,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
    REPEATS: tl.constexpr, ERASES: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A slice of columns of one chunk and head: of `W` and `Q`, or behind them of `U` and `O`."""
    i_c, i_m, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    if start >= end:
        return
    m_t = start + tl.arange(0, L) < end
    if ERASES:
        if i_c < num_key_slices:
            _fold_keys(
                q, k, beta, enters, rests, decays, scores, inverses, queries, entering, writers, transitions,
                i_c, i_m, i_h, start, m_t, H, K, L, BK, BC, REPEATS, CHANNELS, PRECISION,
            )  # fmt: skip
        else:
            _fold_values(
                v, beta, rests, decays, scores, inverses, outputs, writers, end_states,
                i_c - num_key_slices, i_m, i_h, start, m_t, H, K, V, L, BK, BC, REPEATS, ERASES, CHANNELS, PRECISION,
            )  # fmt: skip
    else:
        _fold_values(
            v, beta, rests, decays, scores, inverses, outputs, writers, end_states,
            i_c, i_m, i_h, start, m_t, H, K, V, L, BK, BC, REPEATS, ERASES, CHANNELS, PRECISION,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunks:
    """What every chunk does, fp32.

    decays `[M, H]` or `[M, H, K]`; transitions `W` `[M, H, K, K]`, None where nothing is erased and the decays are all of it;
    end_states `U` `[M, H, K, V]`; queries `Q` `[N, H, K]`; outputs `O` `[N, H, V]`; enters `[N, H]`: what queries, which then
    are as they came in, `[N, Hk, K]`, are still to be scaled by, else None.
    """

    tiling: Tiling
    decays: torch.Tensor
    transitions: torch.Tensor | None
    end_states: torch.Tensor
    queries: torch.Tensor
    outputs: torch.Tensor
    enters: torch.Tensor | None


def prepare(inputs: RecurrenceInputs, tiling: Tiling) -> Chunks:
    """Chunks of contiguous inputs."""
    tokens, heads, value_dim = inputs.v.shape
    key_dim, erases = inputs.k.shape[-1], inputs.beta is not None
    gated = multiply(inputs, tiling)

    def fp32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=inputs.v.device)

    own_queries = inputs.log_decay.ndim == 3
    chunks = Chunks(
        tiling=tiling,
        decays=gated.decays,
        transitions=fp32(max(1, tiling.num_chunks), heads, key_dim, key_dim) if erases else None,
        end_states=fp32(max(1, tiling.num_chunks), heads, key_dim, value_dim),
        queries=gated.queries if own_queries or not erases else fp32(tokens, heads, key_dim),
        outputs=fp32(tokens, heads, value_dim),
        enters=None if own_queries or erases else gated.enters,
    )
    if tiling.num_chunks:
        _fold(inputs, gated, chunks)
    return chunks


def _fold(inputs: RecurrenceInputs, gated: Gated, chunks: Chunks) -> None:
    tiling, (heads, value_dim), key_dim = chunks.tiling, inputs.v.shape[1:], inputs.k.shape[-1]
    beta = gated.rests if inputs.beta is None else inputs.beta
    columns = min(TILE, block(max(key_dim, value_dim)))
    key_slices = 0 if chunks.transitions is None else triton.cdiv(key_dim, columns)
    _fold_kernel[(key_slices + triton.cdiv(value_dim, columns), tiling.num_chunks, heads)](
        inputs.q, inputs.k, inputs.v, beta, gated.enters, gated.rests, gated.decays, gated.scores, gated.inverses,
        tiling.starts, tiling.ends, chunks.queries, gated.entering, gated.writers,
        chunks.end_states if chunks.transitions is None else chunks.transitions, chunks.end_states, chunks.outputs,
        key_slices,
        H=heads, K=key_dim, V=value_dim, L=tiling.length, BK=min(TILE, block(key_dim)), BC=columns,
        REPEATS=inputs.repeats, ERASES=inputs.beta is not None, CHANNELS=inputs.log_decay.ndim == 3,
        PRECISION=dot_precision(inputs), num_warps=4, num_stages=1,
    )  # fmt: skip
