"""Carries states over prepared chunks and stored bodies on a GPU: one launch for every sequence of a pass.

`_carry_kernel` runs a program a sequence, head and block of columns. The columns are `[state | transition]` of a scan
(design §5: the same recurrence with nothing written and nothing read out), or the state of a walk, which takes whole bodies
as one product between its chunks. Dots are fp32 in three tf32 passes: plain tf32 is off by 3e-4 in a transition.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.ops.layout import Body
from services.worker.ops.recurrence.triton_chunks import Tiling, block, prepare, send
from services.worker.ops.recurrence.types import RecurrenceInputs, WalkResult

__all__ = ["NONE", "Course", "Stop", "carry"]

# Rows of a state that one tile of registers holds; more stand in two tiles.
STATE_ROWS = 64
ALIGNMENT = 16
NONE = -1


@triton.jit
def _fp32(address, offset, ALIGNED: tl.constexpr):
    """A pointer behind an address; ALIGNED: to 16 bytes, for wide loads."""
    pointer = address.to(tl.pointer_type(tl.float32)) + offset
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _times(b_x, b_y):
    return tl.dot(b_x, b_y, input_precision="tf32x3")


@triton.jit
def _advance(
    queries, writers, readers, values, scores, enters, rests, decays, outputs,
    b_0, b_1, i_m, i_h, start, end, o_c, width,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    ERASES: tl.constexpr, CHANNELS: tl.constexpr, OF_STATE: tl.constexpr,
):  # fmt: skip
    """Columns of the state, or of the transition, after one chunk; a state's outputs are written."""
    o_l, o_k = tl.arange(0, L), tl.arange(0, BK)
    m_t = o_l < (end - start).to(tl.int32)
    m_0 = m_t[:, None] & (o_k < K)[None, :]
    m_1 = m_t[:, None] & (BK + o_k < K)[None, :]
    m_v = m_t[:, None] & (o_c < width)[None, :]
    # One base a chunk and small offsets: tiles of 64-bit offsets would not fit in registers.
    row = start * H + i_h
    p_k = o_l[:, None] * (H * K) + o_k[None, :]
    p_v = o_l[:, None] * (H * V) + o_c[None, :]
    if ERASES:
        b_u = -_times(tl.load(readers + row * K + p_k, mask=m_0, other=0.0), b_0)
        if K > BK:
            b_u -= _times(tl.load(readers + row * K + p_k + BK, mask=m_1, other=0.0), b_1)
        if OF_STATE:
            b_u += tl.load(values + row * V + p_v, mask=m_v, other=0.0)
    else:
        b_u = tl.load(values + row * V + p_v, mask=m_v, other=0.0)
    if OF_STATE:
        b_o = _times(tl.load(queries + row * K + p_k, mask=m_0, other=0.0), b_0)
        if K > BK:
            b_o += _times(tl.load(queries + row * K + p_k + BK, mask=m_1, other=0.0), b_1)
        if not CHANNELS:
            b_o *= tl.load(enters + row + o_l * H, mask=m_t, other=0.0)[:, None]
        p_s = o_l[:, None] * (H * L) + o_l[None, :]
        b_o += _times(tl.load(scores + row * L + p_s, mask=m_t[:, None], other=0.0), b_u)
        tl.store(outputs + row * V + p_v, b_o, mask=m_v)
    if CHANNELS:
        p_d = (i_m * H + i_h) * K + o_k
        b_0 *= tl.load(decays + p_d, mask=o_k < K, other=0.0)[:, None]
        if K > BK:
            b_1 *= tl.load(decays + p_d + BK, mask=BK + o_k < K, other=0.0)[:, None]
    else:
        b_u *= tl.load(rests + row + o_l * H, mask=m_t, other=0.0)[:, None]
        b_d = tl.load(decays + i_m * H + i_h)
        b_0 *= b_d
        if K > BK:
            b_1 *= b_d
    b_0 += _times(tl.trans(tl.load(writers + row * K + p_k, mask=m_0, other=0.0)), b_u)
    if K > BK:
        b_1 += _times(tl.trans(tl.load(writers + row * K + p_k + BK, mask=m_1, other=0.0)), b_u)
    return b_0, b_1


@triton.jit
def _quadrant(matrix, first_row, first_column, K: tl.constexpr, BK: tl.constexpr, forgets):
    o_r, o_c = first_row + tl.arange(0, BK), first_column + tl.arange(0, BK)
    m_x = (o_r < K)[:, None] & (o_c < K)[None, :] & (not forgets)
    return tl.load(matrix + o_r[:, None] * K + o_c[None, :], mask=m_x, other=0.0)


@triton.jit
def _pass_body(
    transition, end_state, b_0, b_1, i_h, o_c,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BODY: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """`T · state + S`; a transition's address of 0 is a body that forgets what came before."""
    o_k = tl.arange(0, BK)
    forgets = transition == 0
    ends = _fp32(end_state, i_h * K * V, ALIGNED)
    p_e = o_k[:, None] * V + o_c[None, :]
    e_0 = tl.load(ends + p_e, mask=(o_k < K)[:, None] & (o_c < V)[None, :], other=0.0)
    e_1 = b_1
    if K > BK:
        e_1 = tl.load(ends + p_e + BK * V, mask=(BK + o_k < K)[:, None] & (o_c < V)[None, :], other=0.0)
    if BODY == 2:
        matrix = _fp32(transition, i_h * K * K, ALIGNED)
        e_0 += _times(_quadrant(matrix, 0, 0, K, BK, forgets), b_0)
        if K > BK:
            e_0 += _times(_quadrant(matrix, 0, BK, K, BK, forgets), b_1)
            e_1 += _times(_quadrant(matrix, BK, 0, K, BK, forgets), b_0)
            e_1 += _times(_quadrant(matrix, BK, BK, K, BK, forgets), b_1)
    else:
        # One number a channel, or the same one for all.
        stored = _fp32(transition, 0, False)
        p_x = i_h * K + o_k if BODY == 1 else i_h + 0 * o_k
        e_0 += b_0 * tl.load(stored + p_x, mask=(o_k < K) & (not forgets), other=0.0)[:, None]
        if K > BK:
            p_x += BK if BODY == 1 else 0
            e_1 += b_1 * tl.load(stored + p_x, mask=(BK + o_k < K) & (not forgets), other=0.0)[:, None]
    return e_0, e_1


@triton.jit
def _carry_block(
    queries, writers, readers, values, scores, enters, rests, decays,
    cu_steps, steps, transitions, end_states,
    home, outputs, kept, i_c, i_h, i_r, width,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASES: tl.constexpr, CHANNELS: tl.constexpr, OF_STATE: tl.constexpr, BODY: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    o_k, o_c = tl.arange(0, BK), i_c * BV + tl.arange(0, BV)
    m_0 = (o_k < K)[:, None] & (o_c < width)[None, :]
    m_1 = (BK + o_k < K)[:, None] & (o_c < width)[None, :]
    p_h = (i_r * H + i_h) * K * width + o_k[:, None] * width + o_c[None, :]
    b_0 = tl.load(home + p_h, mask=m_0, other=0.0)
    # Channels behind the first BK; where there are none the second half only follows along.
    b_1 = b_0
    if K > BK:
        b_1 = tl.load(home + p_h + BK * width, mask=m_1, other=0.0)
    for i_s in range(tl.load(cu_steps + i_r), tl.load(cu_steps + i_r + 1)):
        # All that a step needs to know is asked for at once, ahead of the products that need its state.
        first_chunk, last_chunk = tl.load(steps + 7 * i_s), tl.load(steps + 7 * i_s + 1)
        run_start, run_end = tl.load(steps + 7 * i_s + 2).to(tl.int64), tl.load(steps + 7 * i_s + 3)
        if OF_STATE:
            body, keep = tl.load(steps + 7 * i_s + 4), tl.load(steps + 7 * i_s + 5).to(tl.int64)
            if BODY >= 0:
                transition = tl.load(transitions + body, mask=body >= 0, other=0)
                end_state = tl.load(end_states + body, mask=body >= 0, other=0)
        else:
            last_chunk = tl.where(tl.load(steps + 7 * i_s + 6) != 0, last_chunk, first_chunk)
        for i_m in range(first_chunk, last_chunk):
            b_0, b_1 = _advance(
                queries, writers, readers, values, scores, enters, rests, decays, outputs,
                b_0, b_1, i_m, i_h, run_start + (i_m - first_chunk) * L, run_end, o_c, width,
                H, K, V, L, BK, ERASES, CHANNELS, OF_STATE,
            )  # fmt: skip
        if OF_STATE:
            if BODY >= 0:  # noqa: SIM102 # known when the kernel is compiled, unlike the other one
                if body >= 0:
                    b_0, b_1 = _pass_body(transition, end_state, b_0, b_1, i_h, o_c, K, V, BK, BODY, ALIGNED)
            if keep >= 0:
                p_e = (keep * H + i_h) * K * V + o_k[:, None] * V + o_c[None, :]
                tl.store(kept + p_e, b_0, mask=m_0)
                if K > BK:
                    tl.store(kept + p_e + BK * V, b_1, mask=m_1)
    tl.store(home + p_h, b_0, mask=m_0)
    if K > BK:
        tl.store(home + p_h + BK * width, b_1, mask=m_1)


@triton.jit
def _carry_kernel(
    queries, writers, readers, values, scores, enters, rests, decays,
    cu_steps, steps, transitions, end_states,
    states, columns, outputs, kept, num_state_blocks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASES: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, BODY: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """One sequence, one head, one block of columns of its state, or of its transition behind them.

    The columns stand in registers as one tile or two of `[BK, BV]`. Blocks of one head are neighbours in the grid, since they
    read the same chunks. A transition's blocks write into `columns` and read nothing out. steps rows: first chunk, one past the
    last, first token, one past the last, body, where to keep the state behind it, whether the transition takes part. BODY:
    the form of stored transitions, below 0 where no sequence has a body.
    """
    i_c, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if COLUMNS:
        if i_c >= num_state_blocks:
            _carry_block(
                queries, writers, readers, values, scores, enters, rests, decays,
                cu_steps, steps, transitions, end_states,
                columns, outputs, kept, i_c - num_state_blocks, i_h, i_r, K,
                H, K, V, L, BK, BV, ERASES, CHANNELS, False, BODY, ALIGNED,
            )  # fmt: skip
        else:
            _carry_block(
                queries, writers, readers, values, scores, enters, rests, decays,
                cu_steps, steps, transitions, end_states,
                states, outputs, kept, i_c, i_h, i_r, V,
                H, K, V, L, BK, BV, ERASES, CHANNELS, True, BODY, ALIGNED,
            )  # fmt: skip
    else:
        _carry_block(
            queries, writers, readers, values, scores, enters, rests, decays,
            cu_steps, steps, transitions, end_states,
            states, outputs, kept, i_c, i_h, i_r, V,
            H, K, V, L, BK, BV, ERASES, CHANNELS, True, BODY, ALIGNED,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop of a sequence: a run, then a body where there is one, then a kept state where it is wanted.

    of_body: the sequence's transition takes part.
    """

    run: int
    body: int = NONE
    keep: int = NONE
    of_body: bool = True


@dataclass(frozen=True, slots=True)
class Course:
    """Where every sequence goes: first step of every sequence `[B + 1]`, and steps as `_carry_kernel` reads them."""

    tiling: Tiling
    cu_steps: torch.Tensor
    steps: torch.Tensor
    num_kept: int

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.cu_steps) - 1

    @classmethod
    def of(cls, tiling: Tiling, stops: Sequence[Sequence[Stop]]) -> "Course":
        """The stops of every sequence, on the device."""
        cu_steps, steps, kept = [0], list[int](), 0
        for sequence in stops:
            for own in sequence:
                chunks, tokens = tiling.chunks_of(own.run), tiling.tokens_of(own.run)
                steps += [chunks.start, chunks.stop, tokens.start, tokens.stop, own.body, own.keep, int(own.of_body)]
                kept += own.keep != NONE
            cu_steps.append(cu_steps[-1] + len(sequence))
        both = send([*cu_steps, *steps], torch.int32, tiling.starts.device)
        return cls(tiling, both[: len(cu_steps)], both[len(cu_steps) :], kept)


@dataclass(frozen=True, slots=True)
class _Bodies:
    """Addresses of transitions and of end states `[2, bodies]`, int64; form and alignment as `_carry_kernel` takes them."""

    addresses: torch.Tensor
    form: int
    is_aligned: bool

    @classmethod
    def of(cls, bodies: Sequence[Body], device: torch.device) -> "_Bodies":
        """Bodies of one layer, on the device."""
        addresses = [0 if body.transition is None else body.transition.data_ptr() for body in bodies]
        addresses += [body.end_state.data_ptr() for body in bodies]
        sizes = [size for body in bodies for size in body.end_state.shape[1:]]
        aligned = all(address % ALIGNMENT == 0 for address in addresses) and all(size % 4 == 0 for size in sizes)
        return cls(send(addresses or [0, 0], torch.int64, device).view(2, -1), _body_form(bodies), aligned)


def carry(
    inputs: RecurrenceInputs,
    course: Course,
    states: torch.Tensor,
    columns: torch.Tensor | None,
    bodies: Sequence[Body],
) -> WalkResult:
    """Carry states `[R, H, K, V]`, and transition columns `[R, H, K, K]` where given, both in place."""
    heads, key_dim, value_dim = states.shape[1:]
    width = min(32, block(value_dim))
    state_blocks = triton.cdiv(value_dim, width)
    column_blocks = 0 if columns is None else triton.cdiv(key_dim, width)
    tiling, chunks, stored = course.tiling, prepare(inputs, course.tiling), _Bodies.of(bodies, states.device)
    outputs = torch.empty_like(inputs.v)
    kept = states.new_empty(max(1, course.num_kept), heads, key_dim, value_dim)
    _carry_kernel[(state_blocks + column_blocks, heads, course.num_sequences)](
        chunks.queries, chunks.writers, chunks.readers, chunks.values,
        chunks.scores, chunks.enters, chunks.rests, chunks.decays,
        course.cu_steps, course.steps, stored.addresses[0], stored.addresses[1],
        states, states if columns is None else columns, outputs, kept, state_blocks,
        H=heads, K=key_dim, V=value_dim, L=tiling.length, BK=_tile_rows(key_dim), BV=width,
        ERASES=inputs.beta is not None, CHANNELS=inputs.log_decay.ndim == 3, COLUMNS=columns is not None,
        BODY=stored.form, ALIGNED=stored.is_aligned, num_warps=4, num_stages=1,
    )  # fmt: skip
    return WalkResult(outputs, states, dict(enumerate(kept[: course.num_kept])))


def _tile_rows(key_dim: int) -> int:
    return block(key_dim if key_dim <= STATE_ROWS else triton.cdiv(key_dim, 2))


def _body_form(bodies: Sequence[Body]) -> int:
    """2 dense, 1 diagonal, 0 one number a head, −1 no body."""
    if not bodies:
        return NONE
    shapes = [body.transition.shape[-2:] for body in bodies if body.transition is not None]
    if not shapes or shapes[0][1] > 1:
        return 2
    return 1 if shapes[0][0] > 1 else 0
