"""The recurrence in the best form that a device has."""

from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any

import torch

from services.worker.ops.device import runs_kernels
from services.worker.ops.layout import Body, BodyAddresses, PartWalk
from services.worker.ops.recurrence import chunked
from services.worker.ops.recurrence.types import CaptureResult, RecurrenceInputs, SlotStates, WalkResult
from services.worker.ops.rotary import Rotary

__all__ = ["capture", "step", "turn_bodies", "walk"]


def _form(inputs: RecurrenceInputs) -> ModuleType:
    if not runs_kernels(inputs.q):
        return chunked
    from services.worker.ops.recurrence import triton

    return triton


def capture(
    inputs: RecurrenceInputs,
    cu_runs: Sequence[int],
    seam_tokens: Sequence[int],
    states: torch.Tensor,
    transitions: torch.Tensor | None,
    prepared: dict[str, Any] | None = None,
) -> CaptureResult:
    """As `naive.capture`; prepared: what kernels work out from the runs alone, for other layers to find."""
    form = _form(inputs)
    if form is chunked:
        return chunked.capture(inputs, cu_runs, seam_tokens, states, transitions)
    result: CaptureResult = form.capture(inputs, cu_runs, seam_tokens, states, transitions, prepared)
    return result


def walk(
    inputs: RecurrenceInputs,
    parts: PartWalk,
    states: SlotStates,
    bodies: Sequence[Body | None],
    keep_after: Collection[int] = (),
    addresses: BodyAddresses | None = None,
) -> WalkResult:
    """As `naive.walk`, of states that move in their slots; addresses: where the bodies lie, for kernels."""
    form = _form(inputs)
    if form is not chunked:
        moved: WalkResult = form.walk(inputs, parts, states, bodies, keep_after, addresses)
        return moved
    result = chunked.walk(inputs, parts, states.read(), bodies, keep_after)
    states.write(result.states)
    return result


def turn_bodies(addresses: BodyAddresses, rotary: Rotary, states: torch.Tensor) -> BodyAddresses:
    """Bodies that kernels read, moved to their positions; states `[slots, H, K, V]` say of which shape they are."""
    from services.worker.ops.recurrence import triton_turn

    return triton_turn.turn_bodies(addresses, rotary, states)


def step(inputs: RecurrenceInputs, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """As `naive.step`."""
    outputs: torch.Tensor = _form(inputs).step(inputs, states, slots)
    return outputs
