"""Short runs and stored bodies of a delta rule on a GPU, keys and values in bf16: a whole walk in one launch.

A walk's steps follow one another, so what counts is how long one takes. A step is a chunk of live tokens, a stored body behind
it, or one of the two. As in `triton_stream` the state is held transposed in registers, here in two halves of key channels, so
that a transition is read in quarters, each split into two bf16 numbers on its way; those of the next step are on their way
meanwhile. Sums are fp32, with an error of 1e-5.
"""

import torch
import triton
import triton.language as tl

from services.worker.ops.layout import BodyAddresses
from services.worker.ops.recurrence.triton_carry import Carried, Course, fp32_at
from services.worker.ops.recurrence.triton_products import multiply
from services.worker.ops.recurrence.triton_stream import dot_split, split, streams
from services.worker.ops.recurrence.types import RecurrenceInputs, SlotStates
from services.worker.ops.tiles import block

__all__ = ["compose", "composes", "joins_bodies"]

# Columns of a state that one program holds: as many as leave enough programs for a chip of 132 multiprocessors. Of long chunks
# fewer than 32 leave products too narrow.
_COLUMNS, _PROGRAMS, _SHORT_CHUNK = (64, 32, 16), 256, 16


@triton.jit
def _look(i_s, end_step, chunk_of, body_of, keep_of, transitions, end_states):
    """What a step is: its chunk, where its body lies, where to keep the state behind it; each -1 or 0 where there is none."""
    m_s = i_s < end_step
    body = tl.load(body_of + i_s, mask=m_s, other=-1)
    return (
        tl.load(chunk_of + i_s, mask=m_s, other=-1), tl.load(keep_of + i_s, mask=m_s, other=-1),
        tl.load(transitions + body, mask=body >= 0, other=0), tl.load(end_states + body, mask=body >= 0, other=0),
    )  # fmt: skip


@triton.jit
def _pass_chunk(
    b_g, b_h, q, k, v, scores, inverses, enters, rests, decays, starts, ends, outputs, chunk, i_h, o_c, low,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REPEATS: tl.constexpr,
):  # fmt: skip
    """Both halves of the transposed state behind a chunk, as they were if there is none. See `triton_stream`."""
    Hk: tl.constexpr = H // REPEATS
    is_chunk, i_m = chunk >= 0, tl.maximum(chunk, 0).to(tl.int64)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    o_l, o_k = tl.arange(0, L), tl.arange(0, BK)
    m_t = (start + o_l < end) & is_chunk
    row, key = start * H + i_h, (start * Hk + i_h // REPEATS) * K
    p_t, p_s = o_l * H, o_l[:, None] * (H * L) + o_l[None, :]
    p_k, p_v = o_l[:, None] * (Hk * K) + o_k[None, :], o_l[:, None] * (H * V) + o_c[None, :]
    m_g, m_h = m_t[:, None] & (o_k < K)[None, :], m_t[:, None] & (BK + o_k < K)[None, :]
    m_v = m_t[:, None] & (o_c < V)[None, :]
    k_g, k_h = tl.load(k + key + p_k, mask=m_g, other=0.0), tl.load(k + key + BK + p_k, mask=m_h, other=0.0)
    q_g, q_h = tl.load(q + key + p_k, mask=m_g, other=0.0), tl.load(q + key + BK + p_k, mask=m_h, other=0.0)
    g_high, g_low = split(b_g)
    h_high, h_low = split(b_h)
    b_x = dot_split(g_high, g_low, tl.trans(k_g), tl.zeros([BV, L], dtype=tl.float32))
    b_x = dot_split(h_high, h_low, tl.trans(k_h), b_x)
    b_o = tl.dot(h_high, tl.trans(q_h), tl.dot(g_high, tl.trans(q_g)))
    b_e = tl.load(enters + row + p_t, mask=m_t, other=0.0)[None, :]
    b_y = tl.trans(tl.load(v + row * V + p_v, mask=m_v, other=0.0)).to(tl.float32) - b_e * b_x
    y_high, y_low = split(b_y)
    b_i = tl.load(inverses + row * L + p_s, mask=m_t[:, None], other=0.0)
    b_u = dot_split(y_high, y_low, tl.trans(b_i), tl.zeros([BV, L], dtype=tl.float32))
    b_i = tl.load(inverses + low + row * L + p_s, mask=m_t[:, None], other=0.0)
    b_u = tl.dot(y_high, tl.trans(b_i), b_u)
    b_s = tl.load(scores + row * L + p_s, mask=m_t[:, None], other=0.0)
    b_o = tl.dot(b_u.to(tl.bfloat16), tl.trans(b_s), b_e * b_o)
    tl.store(outputs + row * V + p_v, tl.trans(b_o.to(outputs.dtype.element_ty)), mask=m_v)
    w_high, w_low = split(b_u * tl.load(rests + row + p_t, mask=m_t, other=0.0)[None, :])
    b_d = tl.where(is_chunk, tl.load(decays + i_m * H + i_h), 1.0)
    return dot_split(w_high, w_low, k_g, b_d * b_g), dot_split(w_high, w_low, k_h, b_d * b_h)


@triton.jit
def _quarter(high, low, transition, rows, columns, K: tl.constexpr, WHOLE: tl.constexpr, is_body, b_n):
    """Adds what a half of the state brings to one of the state behind a body: a quarter of the transition."""
    place = transition + rows[:, None] * K + columns[None, :]
    if WHOLE:
        b_t = tl.load(place, mask=is_body, other=0.0)
    else:
        b_t = tl.load(place, mask=(rows < K)[:, None] & (columns < K)[None, :] & is_body, other=0.0)
    t_high, t_low = split(b_t)
    return tl.dot(high, tl.trans(t_low), dot_split(high, low, tl.trans(t_high), b_n))


@triton.jit
def _compose_kernel(
    q, k, v, scores, inverses, enters, rests, decays, starts, ends, cu_steps, chunk_of, body_of, keep_of,
    transitions, end_states, states, slots, is_fresh, outputs, kept, low,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REPEATS: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One request, one head, one block of columns of its state."""
    i_c, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    step, end_step = tl.load(cu_steps + i_r), tl.load(cu_steps + i_r + 1)
    o_k, o_c = tl.arange(0, BK), i_c * BV + tl.arange(0, BV)
    p_h = o_c[:, None] + o_k[None, :] * V
    m_c, home = (o_c < V)[:, None], states + (tl.load(slots + i_r) * H + i_h) * K * V
    m_h = m_c & (tl.load(is_fresh + i_r) == 0)
    b_g = tl.load(home + p_h, mask=m_h & (o_k < K)[None, :], other=0.0)
    b_h = tl.load(home + BK * V + p_h, mask=m_h & (BK + o_k < K)[None, :], other=0.0)
    chunk, keep, stored, end = _look(step, end_step, chunk_of, body_of, keep_of, transitions, end_states)
    for i_s in range(step, end_step):
        is_body = stored != 0
        p_w, p_u = fp32_at(stored, ALIGNED) + i_h * K * K, fp32_at(end, ALIGNED) + i_h * K * V
        next_chunk, next_keep, stored, end = _look(
            i_s + 1, end_step, chunk_of, body_of, keep_of, transitions, end_states
        )
        b_g, b_h = _pass_chunk(
            b_g, b_h, q, k, v, scores, inverses, enters, rests, decays, starts, ends, outputs, chunk, i_h, o_c, low,
            H, K, V, L, BK, BV, REPEATS,
        )  # fmt: skip
        g_high, g_low = split(b_g)
        h_high, h_low = split(b_h)
        p_e = o_k[:, None] * V + o_c[None, :]
        m_e = (o_c < V)[None, :] & is_body
        b_n = tl.trans(tl.load(p_u + p_e, mask=m_e & (o_k < K)[:, None], other=0.0))
        b_n = _quarter(g_high, g_low, p_w, o_k, o_k, K, WHOLE, is_body, b_n)
        b_n = _quarter(h_high, h_low, p_w, o_k, BK + o_k, K, WHOLE, is_body, b_n)
        b_m = tl.trans(tl.load(p_u + BK * V + p_e, mask=m_e & (BK + o_k < K)[:, None], other=0.0))
        b_m = _quarter(g_high, g_low, p_w, BK + o_k, o_k, K, WHOLE, is_body, b_m)
        b_m = _quarter(h_high, h_low, p_w, BK + o_k, BK + o_k, K, WHOLE, is_body, b_m)
        b_g, b_h = tl.where(is_body, b_n, b_g), tl.where(is_body, b_m, b_h)
        if keep >= 0:
            at_keep = kept + (keep.to(tl.int64) * H + i_h) * K * V
            tl.store(at_keep + p_h, b_g, mask=m_c & (o_k < K)[None, :])
            tl.store(at_keep + BK * V + p_h, b_h, mask=m_c & (BK + o_k < K)[None, :])
        chunk, keep = next_chunk, next_keep
    tl.store(home + p_h, b_g, mask=m_c & (o_k < K)[None, :])
    tl.store(home + BK * V + p_h, b_h, mask=m_c & (BK + o_k < K)[None, :])


def joins_bodies(dtype: torch.dtype, of_channels: bool, key_dim: int) -> bool:
    """Whether walks of a delta rule with keys of such a dtype, and decays of every channel or not, can be taken so."""
    return dtype == torch.bfloat16 and not of_channels and 32 <= block(key_dim) <= 128


def composes(inputs: RecurrenceInputs) -> bool:
    """Whether a walk over such inputs can be taken so."""
    return streams(inputs) and joins_bodies(inputs.k.dtype, inputs.log_decay.ndim == 3, inputs.k.shape[-1])


def _width(num_states: int, value_dim: int, chunk_tokens: int) -> int:
    least = 16 if chunk_tokens <= _SHORT_CHUNK else 32
    widths = [width for width in _COLUMNS if min(least, block(value_dim)) <= width <= block(value_dim)]
    return next((width for width in widths if num_states * triton.cdiv(value_dim, width) >= _PROGRAMS), widths[-1])


def compose(inputs: RecurrenceInputs, course: Course, states: SlotStates, bodies: BodyAddresses) -> Carried:
    """As `triton_carry.carry` of states alone, over a course whose steps are joined."""
    heads, key_dim, value_dim = states.held.shape[1:]
    gated = multiply(inputs, course.tiling, in_bf16=True)
    kept = states.held.new_empty(max(1, course.num_kept), heads, key_dim, value_dim)
    outputs = torch.empty_like(inputs.v)
    is_fresh = torch.zeros_like(states.slots, dtype=torch.bool) if states.is_fresh is None else states.is_fresh
    half, width = block(key_dim) // 2, _width(course.num_sequences * heads, value_dim, course.tiling.length)
    if heads and course.num_sequences:
        _compose_kernel[(triton.cdiv(value_dim, width), heads, course.num_sequences)](
            inputs.q, inputs.k, inputs.v, gated.scores, gated.inverses, gated.enters, gated.rests, gated.decays,
            course.tiling.starts, course.tiling.ends, course.cu_steps, course.chunk_of, course.body_of, course.keep_of,
            bodies.table[0], bodies.table[1], states.held, states.slots, is_fresh, outputs, kept, gated.scores.numel(),
            H=heads, K=key_dim, V=value_dim, L=course.tiling.length, BK=half, BV=width, REPEATS=inputs.repeats,
            ALIGNED=bodies.is_aligned and key_dim % 4 == 0 and value_dim % 4 == 0, WHOLE=key_dim == 2 * half,
            num_warps=8 if width == 32 else 4, num_stages=3 if width == 32 else 2,
        )  # fmt: skip
    return Carried(outputs, states.held, kept[: course.num_kept])
