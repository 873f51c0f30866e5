"""The recurrence on a GPU, states in fp32.

Chunks are multiplied (`triton_products`) and folded (`triton_chunks`), then states carried over them (`triton_carry`). Runs
without stored bodies between them go chunk by chunk instead (`triton_stream`), others with their bodies (`triton_compose`),
where the family and its dtype allow it.

A decode step is one launch of its own, which moves states in their slots.
"""

from collections.abc import Collection, Sequence
from itertools import count, pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from services.worker.ops.columns import FixedColumns
from services.worker.ops.layout import Body, BodyAddresses, PartWalk, WalkRoom
from services.worker.ops.recurrence.chunks import walk_chunk_tokens
from services.worker.ops.recurrence.cuts import Cut, chunk_tokens
from services.worker.ops.recurrence.triton_carry import NONE, Carried, Course, Stop, carry, course_columns, locate
from services.worker.ops.recurrence.triton_compose import compose, composes
from services.worker.ops.recurrence.triton_stream import stream, streams
from services.worker.ops.recurrence.types import (
    CaptureResult,
    RecurrenceInputs,
    ScanResult,
    SlotStates,
    WalkResult,
    identities,
)
from services.worker.ops.tiles import block

__all__ = ["FixedCaptures", "FixedWalk", "capture", "scan", "step", "walk"]


@triton.jit
def _step_kernel(
    q, k, v, log_decay, beta, states, slots, outputs,
    H, K, V, REPEATS,
    BK: tl.constexpr, BV: tl.constexpr, ERASES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One token of one request and head on a block of columns of the state in its slot, in place."""
    i_b, i_h, i_v = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    row = i_b * H + i_h
    p_k = (i_b * (H // REPEATS) + i_h // REPEATS) * K + o_k
    b_k = tl.load(k + p_k, mask=m_k, other=0.0).to(tl.float32)
    if CHANNELS:
        b_d = tl.exp(tl.load(log_decay + row * K + o_k, mask=m_k, other=0.0))[:, None]
    else:
        b_d = tl.exp(tl.load(log_decay + row))
    m_h = m_k[:, None] & m_v[None, :]
    p_h = ((tl.load(slots + i_b) * H + i_h) * K + o_k[:, None]) * V + o_v[None, :]
    b_h = b_d * tl.load(states + p_h, mask=m_h, other=0.0)
    b_v = tl.load(v + row * V + o_v, mask=m_v, other=0.0).to(tl.float32)
    if ERASES:
        b_v = tl.load(beta + row) * (b_v - tl.sum(b_k[:, None] * b_h, axis=0))
    b_h += b_k[:, None] * b_v[None, :]
    tl.store(states + p_h, b_h, mask=m_h)
    b_o = tl.sum(tl.load(q + p_k, mask=m_k, other=0.0).to(tl.float32)[:, None] * b_h, axis=0)
    tl.store(outputs + row * V + o_v, b_o.to(outputs.dtype.element_ty), mask=m_v)


def _contiguous(inputs: RecurrenceInputs) -> RecurrenceInputs:
    beta = None if inputs.beta is None else inputs.beta.contiguous()
    q, k, v, log_decay = (each.contiguous() for each in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
    return RecurrenceInputs(q, k, v, log_decay, beta)


def scan(
    inputs: RecurrenceInputs,
    cu_runs: Sequence[int],
    states: torch.Tensor,
    transitions: torch.Tensor | None,
    prepared: dict[str, Any] | None = None,
) -> ScanResult:
    """As `naive.scan`, fp32 on a GPU; prepared: as of `capture`."""
    inputs = _contiguous(inputs)
    prepared, key = {} if prepared is None else prepared, f"recurrence scan {inputs.log_decay.ndim}"
    if key not in prepared:
        cut = Cut.of(cu_runs, chunk_tokens(inputs))
        prepared[key] = Course.of(cut, [[Stop(run)] for run in range(len(cu_runs) - 1)], states.device)
    course: Course = prepared[key]
    columns = None
    if transitions is not None and inputs.beta is not None:
        columns = _own(transitions)
    own = _own(states)
    passed = stream if streams(inputs) else _carry_alone
    result = passed(inputs, course, own, columns)
    if transitions is not None and inputs.beta is None:
        columns = transitions * _decays(inputs, cu_runs, transitions.shape[-2])
    return ScanResult(result.outputs, result.states, columns)


def capture(
    inputs: RecurrenceInputs,
    cu_runs: Sequence[int],
    seam_tokens: Sequence[int],
    states: torch.Tensor,
    transitions: torch.Tensor | None,
    prepared: dict[str, Any] | None = None,
) -> CaptureResult:
    """As `naive.capture`, fp32 on a GPU: seams, bodies and transitions in one launch.

    prepared: what is worked out from the runs alone, for other layers to find.
    """
    inputs = _contiguous(inputs)
    cu_halves, count = _halves(cu_runs, seam_tokens), len(seam_tokens)
    prepared, key = {} if prepared is None else prepared, _capture_key(inputs.log_decay.ndim == 3)
    if key not in prepared:
        prepared[key] = Course.of(Cut.of(cu_halves, chunk_tokens(inputs)), _capture_stops(count), states.device)
    course: Course = prepared[key]
    own = _own(states)
    if streams(inputs):
        columns = _columns(states) if transitions is None else _own(transitions)
        result = stream(inputs, course, own, columns, from_identity=transitions is None)
        return CaptureResult(result.outputs, own, result.kept, columns)
    begun = identities(inputs, count) if transitions is None else transitions
    if inputs.beta is None:
        result = _carry_alone(inputs, course, own, None)
        columns = begun * _decays(inputs, cu_halves, begun.shape[-2])[1::2]
    else:
        columns = _own(begun)
        result = _carry_alone(inputs, course, own, columns)
    return CaptureResult(result.outputs, own, result.kept, columns)


def _halves(cu_runs: Sequence[int], seam_tokens: Sequence[int]) -> list[int]:
    """Offsets of every run's seam and body."""
    edges = [edge for start, seam in zip(cu_runs[:-1], seam_tokens, strict=True) for edge in (start, start + seam)]
    return [*edges, cu_runs[-1]]


def _capture_stops(count: int) -> list[list[Stop]]:
    return [[Stop(2 * run, keep=run, of_body=False), Stop(2 * run + 1)] for run in range(count)]


def _capture_key(of_channels: bool) -> str:
    return f"recurrence capture {of_channels}"


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _columns(states: torch.Tensor) -> torch.Tensor:
    """Room for the transitions of states."""
    return states.new_empty(*states.shape[:3], states.shape[2])


def _carry_alone(
    inputs: RecurrenceInputs, course: Course, states: torch.Tensor, columns: torch.Tensor | None
) -> Carried:
    """States, and transition columns where given, over chunks without stored bodies; both in place."""
    slots = torch.arange(len(states), device=states.device)
    return carry(inputs, course, SlotStates(states, slots), columns, locate((), states))


def _decays(inputs: RecurrenceInputs, cu_runs: Sequence[int], rows: int) -> torch.Tensor:
    """The product of each run's decays `[R, H, rows, 1]`: the transition where nothing is erased."""
    lengths = torch.tensor([end - begin for begin, end in pairwise(cu_runs)], device=inputs.q.device)
    runs = torch.repeat_interleave(torch.arange(len(lengths), device=inputs.q.device), lengths)
    log_decay = inputs.log_decay.reshape(inputs.log_decay.shape[0], inputs.log_decay.shape[1], rows, 1)
    sums = log_decay.new_zeros(len(lengths), *log_decay.shape[1:]).index_add_(0, runs, log_decay)
    return sums.exp()


def walk(
    inputs: RecurrenceInputs,
    parts: PartWalk,
    states: SlotStates,
    bodies: Sequence[Body | None],
    keep_after: Collection[int] = (),
    addresses: BodyAddresses | None = None,
) -> WalkResult:
    """As `naive.walk`, fp32 on a GPU, of states that move in their slots; addresses: where bodies lie, if that is known."""
    inputs = _contiguous(inputs)
    kept_parts, stored = sorted(keep_after), [body is not None for body in bodies]
    key = _walk_key(inputs.log_decay.ndim == 3, stored, kept_parts)
    if key not in parts.prepared:
        if addresses is not None and not bodies:
            raise ValueError(f"nothing is prepared for this recorded walk: {key}")
        run_lengths = [end - begin for begin, end in pairwise(parts.cu_runs)]
        cut = Cut.of(parts.cu_runs, walk_chunk_tokens(run_lengths, inputs.log_decay.ndim == 3))
        stops = _walk_stops(parts, stored, kept_parts)
        parts.prepared[key] = Course.of(cut, stops, states.held.device, composes(inputs))
    course: Course = parts.prepared[key]
    is_recorded = addresses is not None and not bodies
    if not is_recorded and not any(stored) and streams(inputs):
        result = stream(inputs, course, states.read())
        states.write(result.states)
    else:
        places = locate([body for body in bodies if body is not None], states.held) if addresses is None else addresses
        is_composed = composes(inputs)
        result = compose(inputs, course, states, places) if is_composed else carry(inputs, course, states, None, places)
    return WalkResult(result.outputs, result.states, dict(zip(kept_parts, result.kept, strict=True)))


def _walk_key(of_channels: bool, stored: Sequence[bool], kept_parts: Sequence[int]) -> str:
    return f"recurrence {of_channels} {list(stored)} {list(kept_parts)}"


def _walk_stops(parts: PartWalk, stored: Sequence[bool], kept_parts: Sequence[int]) -> list[list[Stop]]:
    places = count()
    body_of = [next(places) if is_stored else NONE for is_stored in stored]
    keep_of = {part: index for index, part in enumerate(kept_parts)}
    return [
        [Stop(part, body_of[part], keep_of.get(part, NONE)) for part in parts.parts_of(request)]
        for request in range(len(parts.cu_parts) - 1)
    ]


class FixedWalk:
    """The walks of layers of one kind in passes that are recorded once and replayed.

    of_channels: decays of every key channel; joins: bodies are no steps of their own behind chunks (see `joins_bodies`).

    `prepare` enters the course into the recorded walk, which names neither bodies nor runs and keeps as many states as its room.
    """

    def __init__(self, of_channels: bool, room: WalkRoom, device: torch.device, joins: bool) -> None:
        self._room = room
        self._joins_bodies = joins
        self._of_channels = of_channels
        steps = room.chunks + room.parts
        sizes = (room.chunks, room.chunks, room.requests + 1, room.requests, steps, steps, steps)
        self._columns = FixedColumns(sizes, (0, 0, None, None, NONE, NONE, NONE), device)

    def prepare(self, recorded: PartWalk) -> None:
        """See the class."""
        course = Course.over(self._columns.tensors, self._room.chunk_tokens, self._room.kept)
        recorded.prepared[_walk_key(self._of_channels, [], range(self._room.kept))] = course

    def refill(self, parts: PartWalk, stored: Sequence[bool], kept_parts: Sequence[int]) -> None:
        """Follow another walk.

        Raises:
            ValueError: it has more chunks or parts than there is room for.
        """
        cut = Cut.of(parts.cu_runs, self._room.chunk_tokens)
        self._columns.refill(course_columns(cut, _walk_stops(parts, stored, kept_parts), self._joins_bodies))


class FixedCaptures:
    """The captures of a delta rule's layers of one kind in passes that are recorded once and replayed; see `FixedWalk`.

    room: of runs, each with a seam and a body, and of as many kept states.
    """

    def __init__(self, of_channels: bool, room: WalkRoom, device: torch.device) -> None:
        self._of_channels = of_channels
        self._room = room
        steps = room.chunks + room.requests
        sizes = (room.chunks, room.chunks, room.requests + 1, room.requests, steps, steps, steps)
        self._columns = FixedColumns(sizes, (0, 0, None, None, NONE, NONE, NONE), device)

    def prepare(self, recorded: PartWalk) -> None:
        """See `FixedWalk`."""
        course = Course.over(self._columns.tensors, self._room.chunk_tokens, self._room.requests)
        recorded.prepared[_capture_key(self._of_channels)] = course

    def refill(self, cu_runs: Sequence[int], seam_tokens: Sequence[int]) -> None:
        """Follow other runs.

        Raises:
            ValueError: there are more chunks or runs than there is room for.
        """
        cut = Cut.of(_halves(cu_runs, seam_tokens), self._room.chunk_tokens)
        columns = course_columns(cut, _capture_stops(len(seam_tokens)))
        # The transition of a run that is not there has no steps, nor has its state.
        columns[3] = [*columns[3], *[columns[2][-1]] * (self._room.requests - len(seam_tokens))]
        self._columns.refill(columns)


def step(inputs: RecurrenceInputs, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """As `naive.step`, fp32 on a GPU."""
    inputs, outputs = _contiguous(inputs), torch.empty_like(inputs.v)
    heads, key_dim, value_dim = states.shape[1:]
    width = min(32, block(value_dim))
    _step_kernel[(len(slots), heads, triton.cdiv(value_dim, width))](
        inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.q if inputs.beta is None else inputs.beta,
        states, slots, outputs, heads, key_dim, value_dim, inputs.repeats,
        BK=block(key_dim), BV=width, ERASES=inputs.beta is not None, CHANNELS=inputs.log_decay.ndim == 3,
        num_warps=4,
    )  # fmt: skip
    return outputs
