"""The recurrence in chunks of tokens: matrix products inside a chunk, a short recurrence across chunks.

One run, or one request, goes chunk by chunk over views; several advance together (`lockstep`), which costs a few
launches a step instead of a few launches a run.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from services.worker.ops.layout import Body, PartWalk
from services.worker.ops.recurrence import lockstep
from services.worker.ops.recurrence.chunks import CHUNK_TOKENS, Tiling, prepare, tile
from services.worker.ops.recurrence.types import CaptureResult, RecurrenceInputs, ScanResult, WalkResult, identities

__all__ = ["CHUNK_TOKENS", "capture", "scan", "step", "walk"]


def _unpack(tiles: list[torch.Tensor], tiling: Tiling, like: torch.Tensor) -> torch.Tensor:
    return tiling.unpack(torch.stack(tiles)) if tiles else torch.empty_like(like)


def scan(
    inputs: RecurrenceInputs, cu_runs: Sequence[int], states: torch.Tensor, transitions: torch.Tensor | None
) -> ScanResult:
    """As `naive.scan`."""
    inputs = inputs.spread()
    if states.shape[0] > 1:
        return lockstep.scan(inputs, cu_runs, states, transitions)
    tiling = tile(cu_runs, inputs)
    prepared = prepare(inputs, tiling)
    tiles: list[torch.Tensor] = []
    state = states[0]
    transition = None if transitions is None else transitions[0]
    for chunk in tiling.chunks_of[0]:
        outputs, state = prepared.advance(chunk, state)
        tiles.append(outputs)
        if transition is not None:
            transition = prepared.advance_transition(chunk, transition)
    return ScanResult(
        outputs=_unpack(tiles, tiling, inputs.v),
        states=state[None],
        transitions=None if transition is None else transition[None],
    )


def walk(
    inputs: RecurrenceInputs,
    parts: PartWalk,
    states: torch.Tensor,
    bodies: Sequence[Body | None],
    keep_after: Collection[int] = (),
) -> WalkResult:
    """As `naive.walk`."""
    inputs = inputs.spread()
    if states.shape[0] > 1:
        return lockstep.walk(inputs, parts, states, bodies, keep_after)
    tiling = tile(parts.cu_runs, inputs)
    prepared = prepare(inputs, tiling)
    tiles: list[torch.Tensor] = []
    kept: dict[int, torch.Tensor] = {}
    state = states[0]
    for part in parts.parts_of(0):
        for chunk in tiling.chunks_of[part]:
            outputs, state = prepared.advance(chunk, state)
            tiles.append(outputs)
        body = bodies[part]
        if body is not None:
            state = body.apply(state)
        if part in keep_after:
            kept[part] = state.clone()
    return WalkResult(_unpack(tiles, tiling, inputs.v), state[None], kept)


def step(inputs: RecurrenceInputs, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """As `naive.step`, all requests at once."""
    inputs = inputs.spread()
    log_decay = inputs.log_decay if inputs.log_decay.ndim == 3 else inputs.log_decay[..., None]
    decayed = log_decay.exp()[..., None] * states[slots]
    written = inputs.v
    if inputs.beta is not None:
        read = (inputs.k[..., None] * decayed).sum(-2)
        written = inputs.beta[..., None] * (inputs.v - read)
    updated = decayed + inputs.k[..., None] * written[..., None, :]
    states[slots] = updated
    return (inputs.q[..., None] * updated).sum(-2)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Those of several runs that have tokens: which runs, their tokens packed, offsets of each."""

    rows: list[int]
    tokens: slice | torch.Tensor
    cu_runs: tuple[int, ...]


def _present(runs: Sequence[range], device: torch.device) -> _Runs | None:
    rows = [row for row, run in enumerate(runs) if len(run)]
    if not rows:
        return None
    cu_runs = (0, *accumulate(len(runs[row]) for row in rows))
    if len(rows) == 1:
        return _Runs(rows, slice(runs[rows[0]].start, runs[rows[0]].stop), cu_runs)
    places = torch.cat([torch.arange(runs[row].start, runs[row].stop) for row in rows])
    return _Runs(rows, places.to(device), cu_runs)


def capture(
    inputs: RecurrenceInputs,
    cu_runs: Sequence[int],
    seam_tokens: Sequence[int],
    states: torch.Tensor,
    transitions: torch.Tensor | None,
) -> CaptureResult:
    """As `naive.capture`: all seams together, then all bodies."""
    inputs = inputs.spread()
    begun = identities(inputs, len(states)) if transitions is None else transitions
    outputs, end_states, end_transitions = torch.empty_like(inputs.v), states.clone(), begun.clone()
    splits = [start + seam for start, seam in zip(cu_runs[:-1], seam_tokens, strict=True)]
    seams = _present([range(*run) for run in zip(cu_runs[:-1], splits, strict=True)], outputs.device)
    if seams is not None:
        result = scan(inputs[seams.tokens], seams.cu_runs, end_states[seams.rows], None)
        outputs[seams.tokens], end_states[seams.rows] = result.outputs, result.states
    seam_states = end_states.clone()
    bodies = _present([range(*run) for run in zip(splits, cu_runs[1:], strict=True)], outputs.device)
    if bodies is not None:
        started = end_transitions[bodies.rows]
        result = scan(inputs[bodies.tokens], bodies.cu_runs, end_states[bodies.rows], started)
        outputs[bodies.tokens], end_states[bodies.rows] = result.outputs, result.states
        if result.transitions is not None:
            end_transitions[bodies.rows] = result.transitions
    return CaptureResult(outputs, end_states, seam_states, end_transitions)
