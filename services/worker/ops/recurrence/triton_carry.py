"""Carries states over prepared chunks and stored bodies on a GPU.

Chunk or body, a step maps a state to `W · state + U`: `_carry_kernel` follows every sequence of a pass, one product a step,
and notes the state that every chunk begins with; `_read_kernel` reads all outputs out of these at once. A transition's columns
obey the same recurrence with nothing added (design §5), as more blocks of the same launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.ops.layout import Body
from services.worker.ops.recurrence.triton_chunks import TILE, Chunks, Tiling, block, output_precision, prepare, send
from services.worker.ops.recurrence.types import RecurrenceInputs, WalkResult

__all__ = ["NONE", "Course", "Stop", "carry"]

ALIGNMENT = 16
NONE = -1
# Programs of a launch from which on wider blocks of columns leave no multiprocessor idle.
_MANY_PROGRAMS = 512


@triton.jit
def _fp32(address, ALIGNED: tl.constexpr):
    """A pointer behind an address; ALIGNED: to 16 bytes, for wide loads."""
    pointer = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _tile(base, rows, columns, num_rows, num_columns, stride, WHOLE: tl.constexpr):
    """A tile of a matrix; WHOLE: no part of it lies outside."""
    place = base + rows[:, None] * stride + columns[None, :]
    if WHOLE:
        return tl.load(place)
    return tl.load(place, mask=(rows < num_rows)[:, None] & (columns < num_columns)[None, :], other=0.0)


@triton.jit
def _put(base, rows, columns, num_rows, num_columns, stride, b_x, wanted):
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :] & wanted
    tl.store(base + rows[:, None] * stride + columns[None, :], b_x, mask=mask)


@triton.jit
def _times(b_x, b_y):
    return tl.dot(b_x, b_y, input_precision="tf32x3")


@triton.jit
def _scale(base, i_h, rows, K: tl.constexpr, VECTOR: tl.constexpr):
    """What the rows of a state keep: a number a channel, or the same one for all."""
    if VECTOR:
        return tl.load(base + i_h * K + rows, mask=rows < K, other=0.0)[:, None]
    return tl.load(base + i_h)


@triton.jit
def _carry_block(
    first_step, end_step, chunk_of, body_of, keep_of, transitions, end_states, chunk_transitions, chunk_ends,
    home, entries, kept, i_c, i_h, i_r, width,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FORM: tl.constexpr, OF_STATE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A block of columns over all steps of a sequence; they stand in registers as one tile of BK rows, or two."""
    o_0, o_c = tl.arange(0, BK), i_c * BV + tl.arange(0, BV)
    o_1 = BK + o_0
    size = K * K if FORM == 2 else (K if FORM == 1 else 1)
    at_home = home + (i_r * H + i_h) * K * width
    b_0 = _tile(at_home, o_0, o_c, K, width, width, False)
    # Rows behind the first BK; where there are none the second tile only follows along.
    b_1 = _tile(at_home, o_1, o_c, K, width, width, False) if K > BK else b_0
    for i_s in range(first_step, end_step):
        chunk, body = tl.load(chunk_of + i_s).to(tl.int64), tl.load(body_of + i_s)
        keep = tl.load(keep_of + i_s).to(tl.int64)
        is_body = body >= 0
        near = tl.maximum(chunk, 0) * H * 4
        own = tl.load(transitions + body, mask=is_body, other=0)
        stored = _fp32(tl.where(is_body, own, chunk_transitions + near * size), ALIGNED and FORM == 2)
        if OF_STATE:
            at_entry = entries + (chunk * H + i_h) * K * V
            _put(at_entry, o_0, o_c, K, V, V, b_0, chunk >= 0)
            if K > BK:
                _put(at_entry, o_1, o_c, K, V, V, b_1, chunk >= 0)
            own = tl.load(end_states + body, mask=is_body, other=0)
            ends = _fp32(tl.where(is_body, own, chunk_ends + near * (K * V)), ALIGNED) + i_h * K * V
            n_0 = _tile(ends, o_0, o_c, K, V, V, WHOLE)
            n_1 = _tile(ends, o_1, o_c, K, V, V, WHOLE) if K > BK else n_0
        else:
            n_0 = tl.zeros([BK, BV], dtype=tl.float32)
            n_1 = n_0
        if FORM == 2:
            matrix = stored + i_h * K * K
            n_0 += _times(_tile(matrix, o_0, o_0, K, K, K, WHOLE), b_0)
            if K > BK:
                n_0 += _times(_tile(matrix, o_0, o_1, K, K, K, WHOLE), b_1)
                n_1 += _times(_tile(matrix, o_1, o_0, K, K, K, WHOLE), b_0)
                n_1 += _times(_tile(matrix, o_1, o_1, K, K, K, WHOLE), b_1)
        else:
            n_0 += b_0 * _scale(stored, i_h, o_0, K, FORM == 1)
            if K > BK:
                n_1 += b_1 * _scale(stored, i_h, o_1, K, FORM == 1)
        moves = is_body | (chunk >= 0)
        b_0 = tl.where(moves, n_0, b_0)
        b_1 = tl.where(moves, n_1, b_1)
        if OF_STATE:
            at_kept = kept + (keep * H + i_h) * K * V
            _put(at_kept, o_0, o_c, K, V, V, b_0, keep >= 0)
            if K > BK:
                _put(at_kept, o_1, o_c, K, V, V, b_1, keep >= 0)
    _put(at_home, o_0, o_c, K, width, width, b_0, True)
    if K > BK:
        _put(at_home, o_1, o_c, K, width, width, b_1, True)


@triton.jit
def _carry_kernel(
    cu_steps, bodies_from, chunk_of, body_of, keep_of, transitions, end_states, chunk_transitions, chunk_ends,
    states, columns, entries, kept, num_state_blocks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FORM: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One sequence, one head, one block of columns of its state, or of its transition behind them, which begins with its body.

    A step is a chunk, a stored body, or nothing but a state to keep. FORM of transitions: 2 matrices, 1 a number a channel, 0 one
    number. Addresses are those of fp32 numbers. Blocks of one head are neighbours in the grid, since they read the same steps.
    """
    i_c, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    end_step = tl.load(cu_steps + i_r + 1)
    if COLUMNS:
        if i_c >= num_state_blocks:
            _carry_block(
                tl.load(bodies_from + i_r), end_step, chunk_of, body_of, keep_of, transitions, end_states,
                chunk_transitions, chunk_ends, columns, entries, kept, i_c - num_state_blocks, i_h, i_r, K,
                H, K, V, BK, BV, FORM, False, ALIGNED, WHOLE,
            )  # fmt: skip
        else:
            _carry_block(
                tl.load(cu_steps + i_r), end_step, chunk_of, body_of, keep_of, transitions, end_states,
                chunk_transitions, chunk_ends, states, entries, kept, i_c, i_h, i_r, V,
                H, K, V, BK, BV, FORM, True, ALIGNED, WHOLE,
            )  # fmt: skip
    else:
        _carry_block(
            tl.load(cu_steps + i_r), end_step, chunk_of, body_of, keep_of, transitions, end_states,
            chunk_transitions, chunk_ends, states, entries, kept, i_c, i_h, i_r, V,
            H, K, V, BK, BV, FORM, True, ALIGNED, WHOLE,
        )  # fmt: skip


@triton.jit
def _read_kernel(
    queries, enters, inside, entries, starts, ends, outputs,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REPEATS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of columns of the outputs of one chunk and head: `Q · state + O`. SCALED: queries by what has decayed."""
    i_c, i_m, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    Hk: tl.constexpr = H // REPEATS
    o_l, o_k, o_c = tl.arange(0, L), tl.arange(0, BK), i_c * BV + tl.arange(0, BV)
    m_t = start + o_l < end
    p_q = (start * Hk + i_h // REPEATS) * K + o_l[:, None] * (Hk * K)
    p_o = (start * H + i_h) * V + o_l[:, None] * (H * V) + o_c[None, :]
    m_o = m_t[:, None] & (o_c < V)[None, :]
    at_entry = entries + (i_m * H + i_h) * K * V
    b_o = tl.zeros([L, BV], dtype=tl.float32)
    for i_k in tl.static_range(0, K, BK):
        m_k = (i_k + o_k) < K
        b_q = tl.load(queries + p_q + i_k + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0).to(tl.float32)
        b_h = _tile(at_entry, i_k + o_k, o_c, K, V, V, False)
        b_o += tl.dot(b_q, b_h, input_precision=PRECISION)
    if SCALED:
        b_o *= tl.load(enters + start * H + i_h + o_l * H, mask=m_t, other=0.0)[:, None]
    b_o += tl.load(inside + p_o, mask=m_o, other=0.0)
    tl.store(outputs + p_o, b_o.to(outputs.dtype.element_ty), mask=m_o)


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop of a sequence: a run, then a body where there is one, then a kept state where it is wanted.

    of_body: the sequence's transition takes part, from the first such stop on.
    """

    run: int
    body: int = NONE
    keep: int = NONE
    of_body: bool = True


@dataclass(frozen=True, slots=True)
class Course:
    """Where every sequence goes, as `_carry_kernel` reads it.

    cu_steps `[B + 1]`; bodies_from `[B]`: the first step that a transition takes part in; of every step its chunk, its body, and
    where to keep the state behind it, each NONE where there is none.
    """

    tiling: Tiling
    cu_steps: torch.Tensor
    bodies_from: torch.Tensor
    chunk_of: torch.Tensor
    body_of: torch.Tensor
    keep_of: torch.Tensor
    num_kept: int

    @property
    def num_sequences(self) -> int:
        """B."""
        return len(self.bodies_from)

    @classmethod
    def of(cls, tiling: Tiling, stops: Sequence[Sequence[Stop]]) -> "Course":
        """The stops of every sequence, on the device in one transfer."""
        cu_steps, bodies_from, steps = [0], list[int](), list[tuple[int, int, int]]()
        for sequence in stops:
            begins = len(steps)
            for own in sequence:
                begins += 0 if own.of_body else len(_steps(tiling, own))
                steps += _steps(tiling, own)
            bodies_from.append(begins)
            cu_steps.append(len(steps))
        columns = [cu_steps, bodies_from, *([step[field] for step in steps] for field in range(3))]
        sent = send([number for column in columns for number in column], torch.int32, tiling.starts.device)
        num_kept = sum(own.keep != NONE for sequence in stops for own in sequence)
        cu, bodies, chunk_of, body_of, keep_of = sent.split([len(column) for column in columns])
        return cls(tiling, cu, bodies, chunk_of, body_of, keep_of, num_kept)


def _steps(tiling: Tiling, stop: Stop) -> list[tuple[int, int, int]]:
    """Chunk, body and kept place of every step of one stop; a state is kept behind the last."""
    steps = [(chunk, NONE, NONE) for chunk in tiling.chunks_of(stop.run)]
    if stop.body != NONE:
        steps.append((NONE, stop.body, NONE))
    if stop.keep != NONE:
        chunk, body, _ = steps.pop() if steps else (NONE, NONE, NONE)
        steps.append((chunk, body, stop.keep))
    return steps


@dataclass(frozen=True, slots=True)
class _Bodies:
    """Addresses of transitions and of end states `[2, bodies]`, int64, and whether all lie as wide loads want them."""

    addresses: torch.Tensor
    is_aligned: bool

    @classmethod
    def of(cls, bodies: Sequence[Body], forgets: torch.Tensor) -> "_Bodies":
        """Bodies of one layer; forgets: the transition of one that has none."""
        addresses = [(forgets if body.transition is None else body.transition).data_ptr() for body in bodies]
        addresses += [body.end_state.data_ptr() for body in bodies]
        aligned = all(address % ALIGNMENT == 0 for address in addresses)
        return cls(send(addresses or [0, 0], torch.int64, forgets.device).view(2, -1), aligned)


def carry(
    inputs: RecurrenceInputs,
    course: Course,
    states: torch.Tensor,
    columns: torch.Tensor | None,
    bodies: Sequence[Body],
) -> WalkResult:
    """Carry states `[R, H, K, V]`, and transition columns `[R, H, K, K]` where given, both fp32 and in place.

    Outputs are of the values' dtype.
    """
    heads, key_dim, value_dim = states.shape[1:]
    chunks = prepare(inputs, course.tiling)
    entries = states.new_empty(max(1, course.tiling.num_chunks), heads, key_dim, value_dim)
    kept = states.new_empty(max(1, course.num_kept), heads, key_dim, value_dim)
    if heads and course.num_sequences:
        _launch(course, chunks, bodies, (states, columns, entries, kept))
    outputs = torch.empty_like(inputs.v)
    if course.tiling.num_chunks:
        _read(inputs, chunks, entries, outputs)
    return WalkResult(outputs, states, dict(enumerate(kept[: course.num_kept])))


def _launch(
    course: Course,
    chunks: Chunks,
    bodies: Sequence[Body],
    memory: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor],
) -> None:
    states, columns, entries, kept = memory
    heads, key_dim, value_dim = states.shape[1:]
    form = 2 if chunks.transitions is not None else chunks.decays.ndim - 2
    own = chunks.decays if chunks.transitions is None else chunks.transitions
    forgets = states.new_zeros(heads, key_dim, key_dim) if any(body.transition is None for body in bodies) else states
    stored = _Bodies.of(bodies, forgets)
    width = min(TILE, block(value_dim))
    if width > 32 and course.num_sequences * heads * (triton.cdiv(value_dim, width)) < _MANY_PROGRAMS:
        width = 32
    rows = block(key_dim if key_dim <= TILE else triton.cdiv(key_dim, 2))
    state_blocks = triton.cdiv(value_dim, width)
    column_blocks = 0 if columns is None else triton.cdiv(key_dim, width)
    sizes = (key_dim % rows, value_dim % width, key_dim % width if columns is not None else 0)
    _carry_kernel[(state_blocks + column_blocks, heads, course.num_sequences)](
        course.cu_steps, course.bodies_from, course.chunk_of, course.body_of, course.keep_of,
        stored.addresses[0], stored.addresses[1], own.data_ptr(), chunks.end_states.data_ptr(),
        states, states if columns is None else columns, entries, kept, state_blocks,
        H=heads, K=key_dim, V=value_dim, BK=rows, BV=width, FORM=form, COLUMNS=columns is not None,
        ALIGNED=stored.is_aligned and key_dim % 4 == 0 and value_dim % 4 == 0, WHOLE=not any(sizes),
        num_warps=4, num_stages=2,
    )  # fmt: skip


def _read(inputs: RecurrenceInputs, chunks: Chunks, entries: torch.Tensor, outputs: torch.Tensor) -> None:
    (heads, value_dim), key_dim, tiling = inputs.v.shape[1:], inputs.k.shape[-1], chunks.tiling
    width = min(TILE, block(value_dim))
    _read_kernel[(triton.cdiv(value_dim, width), tiling.num_chunks, heads)](
        chunks.queries, chunks.outputs if chunks.enters is None else chunks.enters, chunks.outputs, entries,
        tiling.starts, tiling.ends, outputs,
        H=heads, K=key_dim, V=value_dim, L=tiling.length, BK=min(TILE, block(key_dim)), BV=width,
        REPEATS=heads // chunks.queries.shape[1], SCALED=chunks.enters is not None, PRECISION=output_precision(inputs),
        num_warps=4, num_stages=2,
    )  # fmt: skip
