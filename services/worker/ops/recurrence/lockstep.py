"""The recurrence over several runs or requests that advance together, one chunk or one body a step."""

from collections.abc import Collection, Sequence

import torch

from services.worker.ops.layout import Body, PartWalk, apply_transition
from services.worker.ops.recurrence.chunks import Chunks, Tiling, prepare, tile
from services.worker.ops.recurrence.types import RecurrenceInputs, ScanResult, WalkResult

__all__ = ["scan", "walk"]


class _Columns:
    """States `[B, H, K, X]` that walk over prepared chunks; outputs collect in `tiles` `[M, H, L, X]`."""

    def __init__(self, prepared: Chunks, states: torch.Tensor) -> None:
        self._prepared = prepared
        self.states = states.clone()
        self.tiles = torch.empty_like(prepared.values)

    def advance(self, rows: torch.Tensor, chunks: torch.Tensor) -> None:
        """States `rows` `[n]` over one chunk each."""
        batch = self._prepared.select(chunks)
        outputs, states = batch.advance(0, self.states[rows].flatten(0, 1))
        self.tiles[chunks] = outputs.unflatten(0, (rows.shape[0], -1))
        self.states[rows] = states.unflatten(0, (rows.shape[0], -1))


def scan(
    inputs: RecurrenceInputs, cu_runs: Sequence[int], states: torch.Tensor, transitions: torch.Tensor | None
) -> ScanResult:
    """As `naive.scan`."""
    tiling = tile(cu_runs, inputs)
    prepared = prepare(inputs, tiling)
    columns = _Columns(prepared, states)
    carried = None if transitions is None else transitions.clone()
    for order in range(max((len(chunks) for chunks in tiling.chunks_of), default=0)):
        rows, chunks = _active(tiling, range(len(tiling.chunks_of)), order, states.device)
        columns.advance(rows, chunks)
        if carried is not None:
            advanced = prepared.select(chunks).advance_transition(0, carried[rows].flatten(0, 1))
            carried[rows] = advanced.unflatten(0, (rows.shape[0], -1))
    return ScanResult(tiling.unpack(columns.tiles), columns.states, carried)


def walk(
    inputs: RecurrenceInputs,
    parts: PartWalk,
    states: torch.Tensor,
    bodies: Sequence[Body | None],
    keep_after: Collection[int] = (),
) -> WalkResult:
    """As `naive.walk`: all requests' first parts, then all second parts, and so on."""
    tiling = tile(parts.cu_runs, inputs)
    columns = _Columns(prepare(inputs, tiling), states)
    kept: dict[int, torch.Tensor] = {}
    parts_of = [parts.parts_of(request) for request in range(states.shape[0])]
    for order in range(max(len(own) for own in parts_of)):
        current = [own[order] if order < len(own) else None for own in parts_of]
        lengths = [0 if part is None else len(tiling.chunks_of[part]) for part in current]
        for chunk in range(max(lengths)):
            columns.advance(*_active(tiling, current, chunk, states.device))
        _apply_bodies(columns.states, [None if part is None else bodies[part] for part in current])
        for request, part in enumerate(current):
            if part is not None and part in keep_after:
                kept[part] = columns.states[request].clone()
    return WalkResult(tiling.unpack(columns.tiles), columns.states, kept)


def _active(
    tiling: Tiling, runs: Sequence[int | None], order: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[n]` whose run has a chunk of this order, and that chunk `[n]`."""
    pairs = [
        (row, tiling.chunks_of[run][order])
        for row, run in enumerate(runs)
        if run is not None and order < len(tiling.chunks_of[run])
    ]
    rows, chunks = torch.tensor(pairs, dtype=torch.int64, device=device).unbind(1)
    return rows, chunks


def _apply_bodies(states: torch.Tensor, bodies: Sequence[Body | None]) -> None:
    """`state ← T state + S` in place where a row has a body."""
    present = [(row, body) for row, body in enumerate(bodies) if body is not None]
    linear = [(row, body.transition, body.end_state) for row, body in present if body.transition is not None]
    for row, body in present:
        if body.transition is None:
            states[row] = body.end_state
    if linear:
        rows = torch.tensor([row for row, _, _ in linear], device=states.device)
        transitions = torch.stack([transition for _, transition, _ in linear])
        ends = torch.stack([end for _, _, end in linear])
        states[rows] = apply_transition(transitions, states[rows]) + ends
