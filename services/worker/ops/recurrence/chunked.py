"""The recurrence in chunks of tokens: matrix products inside a chunk, a short recurrence across chunks.

One run, or one request, goes chunk by chunk over views; several advance together (`lockstep`), which costs a few
launches a step instead of a few launches a run.
"""

from collections.abc import Collection, Sequence

import torch

from services.worker.ops.layout import Body, PartWalk
from services.worker.ops.recurrence import lockstep
from services.worker.ops.recurrence.chunks import CHUNK_TOKENS, Tiling, prepare, tile
from services.worker.ops.recurrence.types import RecurrenceInputs, ScanResult, WalkResult

__all__ = ["CHUNK_TOKENS", "scan", "step", "walk"]


def _unpack(tiles: list[torch.Tensor], tiling: Tiling, like: torch.Tensor) -> torch.Tensor:
    return tiling.unpack(torch.stack(tiles)) if tiles else torch.empty_like(like)


def scan(
    inputs: RecurrenceInputs, cu_runs: Sequence[int], states: torch.Tensor, transitions: torch.Tensor | None
) -> ScanResult:
    """As `naive.scan`."""
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


def step(inputs: RecurrenceInputs, states: torch.Tensor) -> WalkResult:
    """As `naive.step`, all requests at once."""
    log_decay = inputs.log_decay if inputs.log_decay.ndim == 3 else inputs.log_decay[..., None]
    decayed = log_decay.exp()[..., None] * states
    written = inputs.v
    if inputs.beta is not None:
        read = (inputs.k[..., None] * decayed).sum(-2)
        written = inputs.beta[..., None] * (inputs.v - read)
    updated = decayed + inputs.k[..., None] * written[..., None, :]
    return WalkResult((inputs.q[..., None] * updated).sum(-2), updated, {})
