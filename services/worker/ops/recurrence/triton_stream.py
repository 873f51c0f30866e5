"""Long runs of a delta rule on a GPU, keys and values in bf16: chunk after chunk through the state, in one launch.

Where hundreds of heads run side by side, what counts is traffic, not the number of products in order. So nothing is folded
ahead (`triton_chunks`): a chunk's writes `u = (I + A)⁻¹ β (v − e^G k · state)` (`chunks.py` has the algebra) are found as it is
passed, and its outputs read at once. The state is held transposed, `[V, K]`, in registers: then it is the left side of every
product, keys, queries and inverses stand on the right as they lie in memory, and nothing goes back and forth between them.

What reaches a state is fp32 but for keys, which came in as bf16: an fp32 factor is two bf16 numbers, whose products are
summed in fp32, with an error of 1e-5. Outputs are read out of the state rounded to bf16, as they are rounded themselves.
"""

import torch
import triton
import triton.language as tl

from services.worker.ops.recurrence.triton_carry import Carried, Course
from services.worker.ops.recurrence.triton_products import multiply
from services.worker.ops.recurrence.types import RecurrenceInputs
from services.worker.ops.tiles import block

__all__ = ["dot_split", "split", "stream", "streams"]

# Columns of a state, or of a transition, that one program holds: twice as many where there are states of this many heads.
_COLUMNS, _MANY_HEADS = 64, 256


@triton.jit
def split(b_x):
    """An fp32 tile as a sum of two in bf16."""
    high = b_x.to(tl.bfloat16)
    return high, (b_x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def dot_split(high, low, b_y, b_z):
    """`(high + low) · y + z`; y in bf16."""
    return tl.dot(low, b_y, tl.dot(high, b_y, b_z))


@triton.jit
def _pass_chunk(
    b_h, q, k, v, scores, inverses, enters, rests, decays, starts, ends, outputs, i_m, i_h, o_c, low,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REPEATS: tl.constexpr, OF_STATE: tl.constexpr,
):  # fmt: skip
    """The transposed state, or columns of a transition, into which nothing is written, behind one chunk; as it was if none."""
    Hk: tl.constexpr = H // REPEATS
    is_chunk, i_m = i_m >= 0, tl.maximum(i_m, 0).to(tl.int64)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    o_l, o_k = tl.arange(0, L), tl.arange(0, BK)
    m_t = (start + o_l < end) & is_chunk
    # Offsets of 32 bits behind the chunk's own place take half the registers.
    row, key = start * H + i_h, (start * Hk + i_h // REPEATS) * K
    p_g, p_s = o_l * H, o_l[:, None] * (H * L) + o_l[None, :]
    p_k, m_k = o_l[:, None] * (Hk * K) + o_k[None, :], m_t[:, None] & (o_k < K)[None, :]
    b_k = tl.load(k + key + p_k, mask=m_k, other=0.0)
    b_g = tl.load(enters + row + p_g, mask=m_t, other=0.0)[None, :]
    h_high, h_low = split(b_h)
    b_y = -b_g * dot_split(h_high, h_low, tl.trans(b_k), tl.zeros([BV, L], dtype=tl.float32))
    if OF_STATE:
        b_q = tl.load(q + key + p_k, mask=m_k, other=0.0)
        b_o = b_g * tl.dot(h_high, tl.trans(b_q))
        p_v, m_v = o_l[:, None] * (H * V) + o_c[None, :], m_t[:, None] & (o_c < V)[None, :]
        b_y += tl.trans(tl.load(v + row * V + p_v, mask=m_v, other=0.0)).to(tl.float32)
    y_high, y_low = split(b_y)
    b_i = tl.load(inverses + row * L + p_s, mask=m_t[:, None], other=0.0)
    b_u = dot_split(y_high, y_low, tl.trans(b_i), tl.zeros([BV, L], dtype=tl.float32))
    b_i = tl.load(inverses + low + row * L + p_s, mask=m_t[:, None], other=0.0)
    b_u = tl.dot(y_high, tl.trans(b_i), b_u)
    if OF_STATE:
        b_s = tl.load(scores + row * L + p_s, mask=m_t[:, None], other=0.0)
        b_o = tl.dot(b_u.to(tl.bfloat16), tl.trans(b_s), b_o)
        tl.store(outputs + row * V + p_v, tl.trans(b_o.to(outputs.dtype.element_ty)), mask=m_v)
    w_high, w_low = split(b_u * tl.load(rests + row + p_g, mask=m_t, other=0.0)[None, :])
    b_d = tl.load(decays + i_m * H + i_h)
    return dot_split(w_high, w_low, b_k, b_h * tl.where(is_chunk, b_d, 1.0))


@triton.jit
def _stream_kernel(
    q, k, v, scores, inverses, enters, rests, decays, starts, ends, cu_steps, bodies_from, chunk_of, keep_of,
    states, columns, outputs, kept, num_state_blocks, low,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REPEATS: tl.constexpr, COLUMNS: tl.constexpr, FROM_IDENTITY: tl.constexpr,
):  # fmt: skip
    """One sequence, one head, one block of columns of its state, or of its transition behind them, which begins with its body."""
    i_c, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first_step, end_step = tl.load(cu_steps + i_r), tl.load(cu_steps + i_r + 1)
    o_k = tl.arange(0, BK)
    if i_c < num_state_blocks:
        o_c = i_c * BV + tl.arange(0, BV)
        p_h, m_h = o_c[:, None] + o_k[None, :] * V, (o_c < V)[:, None] & (o_k < K)[None, :]
        at_home = states + (i_r * H + i_h) * K * V
        b_h = tl.load(at_home + p_h, mask=m_h, other=0.0)
        for i_s in range(first_step, end_step):
            b_h = _pass_chunk(
                b_h, q, k, v, scores, inverses, enters, rests, decays, starts, ends, outputs,
                tl.load(chunk_of + i_s), i_h, o_c, low, H, K, V, L, BK, BV, REPEATS, True,
            )  # fmt: skip
            keep = tl.load(keep_of + i_s).to(tl.int64)
            if keep >= 0:
                tl.store(kept + (keep * H + i_h) * K * V + o_c[:, None] + o_k[None, :] * V, b_h, mask=m_h)
        tl.store(at_home + p_h, b_h, mask=m_h)
    elif COLUMNS:
        o_c = (i_c - num_state_blocks) * BV + tl.arange(0, BV)
        p_h, m_h = o_c[:, None] + o_k[None, :] * K, (o_c < K)[:, None] & (o_k < K)[None, :]
        at_home = columns + (i_r * H + i_h) * K * K
        b_h = (o_c[:, None] == o_k[None, :]).to(tl.float32)
        if not FROM_IDENTITY:
            b_h = tl.load(at_home + p_h, mask=m_h, other=0.0)
        for i_s in range(tl.load(bodies_from + i_r), end_step):
            b_h = _pass_chunk(
                b_h, q, k, v, scores, inverses, enters, rests, decays, starts, ends, outputs,
                tl.load(chunk_of + i_s), i_h, o_c, low, H, K, K, L, BK, BV, REPEATS, False,
            )  # fmt: skip
        tl.store(at_home + p_h, b_h, mask=m_h)


def streams(inputs: RecurrenceInputs) -> bool:
    """Whether such inputs can be taken so."""
    return inputs.beta is not None and inputs.log_decay.ndim == 2 and inputs.k.dtype == torch.bfloat16


def stream(
    inputs: RecurrenceInputs,
    course: Course,
    states: torch.Tensor,
    columns: torch.Tensor | None = None,
    from_identity: bool = False,
) -> Carried:
    """States `[R, H, K, V]`, and transition columns `[R, H, K, K]` where given, both in place, over chunks alone.

    from_identity: columns begin with the identity, whatever stands in them.
    """
    heads, key_dim, value_dim = states.shape[1:]
    gated = multiply(inputs, course.tiling, in_bf16=True)
    kept = states.new_empty(max(1, course.num_kept), heads, key_dim, value_dim)
    outputs = torch.empty_like(inputs.v)
    is_crowded = course.num_sequences * heads >= _MANY_HEADS
    width = min(2 * _COLUMNS if is_crowded else _COLUMNS, block(value_dim))
    state_blocks = triton.cdiv(value_dim, width)
    column_blocks = 0 if columns is None else triton.cdiv(key_dim, width)
    if heads and course.num_sequences:
        _stream_kernel[(state_blocks + column_blocks, heads, course.num_sequences)](
            inputs.q, inputs.k, inputs.v, gated.scores, gated.inverses, gated.enters, gated.rests, gated.decays,
            course.tiling.starts, course.tiling.ends, course.cu_steps, course.bodies_from, course.chunk_of, course.keep_of,
            states, states if columns is None else columns, outputs, kept, state_blocks, gated.scores.numel(),
            H=heads, K=key_dim, V=value_dim, L=course.tiling.length, BK=block(key_dim), BV=width,
            REPEATS=inputs.repeats, COLUMNS=columns is not None, FROM_IDENTITY=from_identity,
            num_warps=8 if width > _COLUMNS else 4, num_stages=2,
        )  # fmt: skip
    return Carried(outputs, states, kept[: course.num_kept])
