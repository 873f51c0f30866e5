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

from services.worker.ops.columns import send_columns, send_into
from services.worker.ops.layout import BODY_ALIGNMENT, Body, BodyAddresses
from services.worker.ops.recurrence.cuts import TILE, Cut, Tiling, dot_precision
from services.worker.ops.recurrence.triton_chunks import Chunks, prepare
from services.worker.ops.recurrence.types import RecurrenceInputs, SlotStates
from services.worker.ops.tiles import block

__all__ = ["NONE", "Carried", "Course", "Stop", "carry", "course_columns", "fp32_at", "locate"]

NONE = -1
# Programs of a launch from which on wider blocks of columns leave no multiprocessor idle.
_MANY_PROGRAMS = 512


@triton.jit
def fp32_at(address, ALIGNED: tl.constexpr):
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
        b_x = tl.load(place)
    else:
        b_x = tl.load(place, mask=(rows < num_rows)[:, None] & (columns < num_columns)[None, :], other=0.0)
    return b_x


@triton.jit
def _put(base, rows, columns, num_rows, num_columns, stride, b_x, wanted):
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :] & wanted
    tl.store(base + rows[:, None] * stride + columns[None, :], b_x, mask=mask)


@triton.jit
def _scale(base, i_h, rows, K: tl.constexpr, VECTOR: tl.constexpr):
    """What the rows of a state keep: a number a channel, or the same one for all."""
    return tl.load(base + i_h * K + rows, mask=rows < K, other=0.0)[:, None] if VECTOR else tl.load(base + i_h)


@triton.jit
def _look(
    i_s, end_step, chunk_of, body_of, keep_of, transitions, end_states, chunk_transitions, chunk_ends,
    SIZE: tl.constexpr, END_SIZE: tl.constexpr,
):  # fmt: skip
    """What a step is: its chunk and the place to keep the state behind it, where `W` and `U` lie, whether there are any."""
    m_s = i_s < end_step
    chunk = tl.load(chunk_of + i_s, mask=m_s, other=-1).to(tl.int64)
    body = tl.load(body_of + i_s, mask=m_s, other=-1)
    keep = tl.load(keep_of + i_s, mask=m_s, other=-1).to(tl.int64)
    is_body, near = body >= 0, tl.maximum(chunk, 0) * 4
    own = tl.load(transitions + body, mask=is_body, other=0)
    stored = tl.where(is_body, own, chunk_transitions + near * SIZE)
    own = tl.load(end_states + body, mask=is_body, other=0)
    ends = tl.where(is_body, own, chunk_ends + near * END_SIZE)
    return chunk, keep, stored, ends, is_body | (chunk >= 0)


@triton.jit
def _carry_kernel(
    cu_steps, bodies_from, chunk_of, body_of, keep_of, transitions, end_states, chunk_transitions, chunk_ends,
    states, slots, is_fresh, columns, entries, kept, num_state_blocks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FORM: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sequence, one head, one block of columns of its state, or of its transition behind them, which begins with its body.

    The block stands in registers. A step is a chunk, a stored body, or nothing but a state to keep; it is looked up during the
    one before it, so that the loads of its matrices run ahead of the products. FORM of transitions: 2 matrices, 1 a number a
    channel, 0 one number. Addresses are those of fp32 numbers. Blocks of one head are neighbours in the grid, since they read
    the same steps.
    """
    i_c, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first_step, end_step = tl.load(cu_steps + i_r), tl.load(cu_steps + i_r + 1)
    home, width, of_state = states + tl.load(slots + i_r) * (H * K * V), V, True
    is_empty = tl.load(is_fresh + i_r)
    if COLUMNS:
        of_state = i_c < num_state_blocks
        if i_c >= num_state_blocks:
            home, width, i_c = columns + i_r * (H * K * K), K, i_c - num_state_blocks
            is_empty = is_empty & False
            first_step = tl.load(bodies_from + i_r)
    o_k, o_c = tl.arange(0, BK), i_c * BV + tl.arange(0, BV)
    size: tl.constexpr = K * K if FORM == 2 else (K if FORM == 1 else 1)
    at_home = home + i_h * K * width
    b_h = tl.where(is_empty, 0.0, _tile(at_home, o_k, o_c, K, width, width, False))
    chunk, keep, stored, ends, moves = _look(
        first_step, end_step, chunk_of, body_of, keep_of, transitions, end_states, chunk_transitions, chunk_ends,
        H * size, H * K * V,
    )  # fmt: skip
    for i_s in range(first_step, end_step):
        p_w, p_u = fp32_at(stored, ALIGNED and FORM == 2), fp32_at(ends, ALIGNED) + i_h * K * V
        next_chunk, next_keep, stored, ends, next_moves = _look(
            i_s + 1, end_step, chunk_of, body_of, keep_of, transitions, end_states, chunk_transitions, chunk_ends,
            H * size, H * K * V,
        )  # fmt: skip
        _put(entries + (chunk * H + i_h) * K * V, o_k, o_c, K, V, V, b_h, (chunk >= 0) & of_state)
        if COLUMNS:
            m_u = (o_k < K)[:, None] & (o_c < V)[None, :] & of_state
            b_u = tl.load(p_u + o_k[:, None] * V + o_c[None, :], mask=m_u, other=0.0)
        else:
            b_u = _tile(p_u, o_k, o_c, K, V, V, WHOLE)
        if FORM == 2:
            b_w = _tile(p_w + i_h * K * K, o_k, o_k, K, K, K, WHOLE)
            b_n = tl.dot(b_w, b_h, b_u, input_precision=PRECISION)
        else:
            b_n = b_u + b_h * _scale(p_w, i_h, o_k, K, FORM == 1)
        b_h = tl.where(moves, b_n, b_h)
        _put(kept + (keep * H + i_h) * K * V, o_k, o_c, K, V, V, b_h, (keep >= 0) & of_state)
        chunk, keep, moves = next_chunk, next_keep, next_moves
    _put(at_home, o_k, o_c, K, width, width, b_h, True)


@triton.jit
def _read_kernel(
    queries, enters, inside, entries, starts, ends, outputs,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REPEATS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of columns of the outputs of one chunk and head: `Q · state + O`. SCALED: queries by what has decayed."""
    i_c, i_m, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    if start >= end:
        return
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
    def of(
        cls, cut: Cut, stops: Sequence[Sequence[Stop]], device: torch.device, joins_bodies: bool = False
    ) -> "Course":
        """The stops of every sequence, on the device in one transfer; joins_bodies: see `course_columns`."""
        num_kept = sum(own.keep != NONE for sequence in stops for own in sequence)
        return cls.over(send_columns(course_columns(cut, stops, joins_bodies), device), cut.length, num_kept)

    @classmethod
    def over(cls, columns: Sequence[torch.Tensor], length: int, num_kept: int) -> "Course":
        """Over tensors in the order of `course_columns`."""
        starts, ends, *course = columns
        cu_steps, bodies_from, chunk_of, body_of, keep_of = course
        return cls(Tiling(starts, ends, length), cu_steps, bodies_from, chunk_of, body_of, keep_of, num_kept)


def course_columns(cut: Cut, stops: Sequence[Sequence[Stop]], joins_bodies: bool = False) -> list[Sequence[int]]:
    """Starts and ends of chunks, then the columns of a `Course`; joins_bodies: a body is no step of its own behind a chunk."""
    cu_steps, bodies_from, steps = [0], list[int](), list[tuple[int, int, int]]()
    for sequence in stops:
        begins = len(steps)
        for own in sequence:
            taken = _steps(cut, own, joins_bodies)
            begins += 0 if own.of_body else len(taken)
            steps += taken
        bodies_from.append(begins)
        cu_steps.append(len(steps))
    return [cut.starts, cut.ends, cu_steps, bodies_from, *([step[field] for step in steps] for field in range(3))]


def _steps(cut: Cut, stop: Stop, joins_bodies: bool) -> list[tuple[int, int, int]]:
    """Chunk, body and kept place of every step of one stop; a state is kept behind the last."""
    steps = [(chunk, NONE, NONE) for chunk in cut.chunks_of(stop.run)]
    if stop.body != NONE:
        chunk = steps.pop()[0] if joins_bodies and steps else NONE
        steps.append((chunk, stop.body, NONE))
    if stop.keep != NONE:
        chunk, body, _ = steps.pop() if steps else (NONE, NONE, NONE)
        steps.append((chunk, body, stop.keep))
    return steps


@dataclass(frozen=True, slots=True)
class Carried:
    """outputs `[N, H, V]` of the values' dtype; states: those that were carried; kept `[kept, H, K, V]`."""

    outputs: torch.Tensor
    states: torch.Tensor
    kept: torch.Tensor


def locate(bodies: Sequence[Body], states: torch.Tensor) -> BodyAddresses:
    """Bodies of one layer without their tails, by what states `[R, H, K, V]` say of their shape."""
    if not bodies:
        # A transfer would wait for the device in every layer of a pass without stored bodies.
        return BodyAddresses(torch.empty(3, 1, dtype=torch.int64, device=states.device), is_aligned=True)
    heads, key_dim, _ = states.shape[1:]
    zeros = states.new_zeros(heads, key_dim, key_dim) if any(body.transition is None for body in bodies) else states
    rows = [
        [(zeros if body.transition is None else body.transition).data_ptr() for body in bodies],
        [body.end_state.data_ptr() for body in bodies],
        [0] * len(bodies),
    ]
    table = torch.tensor(rows, dtype=torch.int64)
    sent = torch.empty_like(table, device=states.device)
    send_into(sent, table)
    return BodyAddresses(sent, bool((table % BODY_ALIGNMENT == 0).all()), zeros)


def carry(
    inputs: RecurrenceInputs,
    course: Course,
    states: SlotStates,
    columns: torch.Tensor | None,
    bodies: BodyAddresses,
) -> Carried:
    """Carry states `[H, K, V]`, and transition columns `[R, H, K, K]` where given, both fp32 and in place."""
    held = states.held
    heads, key_dim, value_dim = held.shape[1:]
    chunks = prepare(inputs, course.tiling)
    entries = held.new_empty(max(1, course.tiling.num_chunks), heads, key_dim, value_dim)
    kept = held.new_empty(max(1, course.num_kept), heads, key_dim, value_dim)
    if heads and course.num_sequences:
        _launch(course, chunks, bodies, (states, columns, entries, kept), dot_precision(inputs))
    outputs = torch.empty_like(inputs.v)
    if course.tiling.num_chunks:
        _read(inputs, chunks, entries, outputs)
    return Carried(outputs, held, kept[: course.num_kept])


def _launch(
    course: Course,
    chunks: Chunks,
    bodies: BodyAddresses,
    memory: tuple[SlotStates, torch.Tensor | None, torch.Tensor, torch.Tensor],
    precision: str,
) -> None:
    states, columns, entries, kept = memory
    heads, key_dim, value_dim = states.held.shape[1:]
    is_fresh = torch.zeros_like(states.slots, dtype=torch.bool) if states.is_fresh is None else states.is_fresh
    form = 2 if chunks.transitions is not None else chunks.decays.ndim - 2
    own = chunks.decays if chunks.transitions is None else chunks.transitions
    rows, width = block(key_dim), min(TILE, block(value_dim))
    if width > 32 and course.num_sequences * heads * triton.cdiv(value_dim, width) < _MANY_PROGRAMS:
        width = 32
    state_blocks = triton.cdiv(value_dim, width)
    column_blocks = 0 if columns is None else triton.cdiv(key_dim, width)
    sizes = (key_dim % rows, value_dim % width, key_dim % width if columns is not None else 0)
    _carry_kernel[(state_blocks + column_blocks, heads, course.num_sequences)](
        course.cu_steps, course.bodies_from, course.chunk_of, course.body_of, course.keep_of,
        bodies.table[0], bodies.table[1], own.data_ptr(), chunks.end_states.data_ptr(),
        states.held, states.slots, is_fresh, states.held if columns is None else columns, entries, kept, state_blocks,
        H=heads, K=key_dim, V=value_dim, BK=rows, BV=width, FORM=form, COLUMNS=columns is not None,
        ALIGNED=bodies.is_aligned and key_dim % 4 == 0 and value_dim % 4 == 0, WHOLE=not any(sizes),
        PRECISION=precision,
        num_warps=8 if rows > TILE else 4, num_stages=3,
    )  # fmt: skip


def _read(inputs: RecurrenceInputs, chunks: Chunks, entries: torch.Tensor, outputs: torch.Tensor) -> None:
    (heads, value_dim), key_dim, tiling = inputs.v.shape[1:], inputs.k.shape[-1], chunks.tiling
    width = min(TILE, block(value_dim))
    _read_kernel[(triton.cdiv(value_dim, width), tiling.num_chunks, heads)](
        chunks.queries, chunks.outputs if chunks.enters is None else chunks.enters, chunks.outputs, entries,
        tiling.starts, tiling.ends, outputs,
        H=heads, K=key_dim, V=value_dim, L=tiling.length, BK=min(TILE, block(key_dim)), BV=width,
        REPEATS=heads // chunks.queries.shape[1], SCALED=chunks.enters is not None, PRECISION=dot_precision(inputs),
        num_warps=4, num_stages=2,
    )  # fmt: skip
