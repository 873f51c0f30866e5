"""Linear layers: the three passes that every family shares, between its projections and its output."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from services.worker.mixers.batch import (
    CaptureBatch,
    CombineBatch,
    DecodeBatch,
    LinearCarry,
    LinearPlane,
    LinearSlots,
    LinearSnapshot,
    WholeSegments,
    finish_planes,
)
from services.worker.mixers.shapes import StateShape
from services.worker.ops.body_planes import PackedBodies
from services.worker.ops.layout import Body, BodyAddresses, PartWalk
from services.worker.ops.recurrence import RecurrenceInputs, SlotStates
from services.worker.ops.recurrence import dispatch as recurrence
from services.worker.ops.rotary import Rotary
from services.worker.ops.short_conv import ConvResult
from services.worker.ops.short_conv import dispatch as short_conv

__all__ = ["LinearMixer", "LinearProjection", "Projected"]


@dataclass(frozen=True, slots=True)
class Projected:
    """Tokens on their way in: rows `[N, C]` of q, k and v, before the convolution where the family has one.

    gate: for the output; gates: what decays and writing strengths are made of; all in the family's own shape.
    """

    rows: torch.Tensor
    gate: torch.Tensor
    gates: tuple[torch.Tensor, ...]


class LinearProjection(Protocol):
    """A family's way into its recurrence and out of it."""

    @property
    def conv(self) -> torch.Tensor | None:
        """Taps `[C, taps]` of the short convolution, None without one."""
        ...

    @property
    def decays_channels(self) -> bool:
        """Every key channel decays on its own."""
        ...

    @property
    def erases(self) -> bool:
        """A token erases what its key held before (a delta rule)."""
        ...

    def project(self, hidden: torch.Tensor) -> Projected:
        """Normed hidden states `[N, hidden]` to what the tokens bring."""
        ...

    def inputs(self, rows: torch.Tensor, projected: Projected) -> RecurrenceInputs:
        """Rows `[N, C]` behind the convolution to inputs, normed and scaled, not rotated."""
        ...

    def output(self, mixed: torch.Tensor, projected: Projected) -> torch.Tensor:
        """The recurrence's outputs `[N, H, V]` to `[N, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class LinearMixer:
    """One layer with its running states. rotary turns queries and keys where the family gives them position."""

    shape: StateShape
    projection: LinearProjection
    rotary: Rotary | None
    slots: LinearSlots

    def capture(self, hidden: torch.Tensor, batch: CaptureBatch) -> torch.Tensor:
        """See `Mixer`; advances every segment's carry, or leaves the planes of whole segments."""
        projected = self.projection.project(hidden)
        if batch.whole is not None:
            return self.projection.output(
                self._capture_whole(projected, batch, batch.whole).to(hidden.dtype), projected
            )
        carries = batch.carries_of(self.slots.index)
        tails = _stack([carry.tail for carry in carries])
        conv = self._convolve(projected.rows, batch.walk, tails, [None] * len(carries))
        inputs = self._inputs(conv.outputs, projected, batch.queries.positions)
        result = recurrence.capture(
            inputs,
            batch.walk.cu_runs,
            batch.seam_tokens,
            _stack([carry.state for carry in carries]),
            _transitions(self.shape, carries),
            batch.walk.prepared,
        )
        bounds = inputs.log_bound
        for run, (carry, seam) in enumerate(zip(carries, batch.seam_tokens, strict=True)):
            tokens = batch.walk.run(run)
            carry.tail, carry.state = conv.tails[run], result.states[run]
            if tokens.stop - tokens.start > seam:
                if carry.transition is None:
                    carry.seam_state = result.seam_states[run]
                carry.transition = result.transitions[run]
                carry.log_decays.append(bounds[tokens.start + seam : tokens.stop])
        return self.projection.output(result.outputs.to(hidden.dtype), projected)

    def _capture_whole(self, projected: Projected, batch: CaptureBatch, whole: WholeSegments) -> torch.Tensor:
        begin, count = whole.begin[self.slots.index], len(whole.firsts)
        tails = begin.tail.expand(count, *begin.tail.shape)
        body_tails = [None] * count if whole.no_bodies is None else []
        conv = self._convolve(projected.rows, batch.walk, tails, body_tails, addresses=whole.no_bodies)
        inputs = self._inputs(conv.outputs, projected, batch.queries.positions)
        states = begin.state.expand(count, *begin.state.shape)
        result = recurrence.capture(inputs, batch.walk.cu_runs, batch.seam_tokens, states, None, batch.walk.prepared)
        passed = (result.transitions, result.seam_states, result.states, conv.tails, inputs.log_bound)
        whole.keep(self.slots.index, PackedBodies(*passed, whole.firsts, whole.counts))
        return result.outputs

    def finish(self, carries: Sequence[LinearCarry], firsts: Sequence[int]) -> list[LinearPlane]:
        """The planes of finished bodies, the first token of each of which stood at such a position of its capture."""
        planes = finish_planes(carries)
        if self.rotary is None:
            return planes
        return [
            replace(plane, end_state=self.rotary.rotate_state(plane.end_state, -first))
            for plane, first in zip(planes, firsts, strict=True)
        ]

    def combine(self, hidden: torch.Tensor, batch: CombineBatch) -> torch.Tensor:
        """See `Mixer`; advances the requests' state slots over live runs and stored bodies."""
        projected = self.projection.project(hidden)
        planes, addresses = batch.planes_of(self.slots.index), batch.addresses_of(self.slots.index)
        conv = self._convolve(
            projected.rows,
            batch.walk,
            batch.begin(self.slots.tails),
            [None if plane is None else plane.tail for plane in planes],
            batch.keep_after,
            addresses,
        )
        result = recurrence.walk(
            self._inputs(conv.outputs, projected, batch.queries.positions),
            batch.walk,
            SlotStates(self.slots.states, batch.slots, batch.is_fresh),
            [self._body(*placed, addresses) for placed in zip(planes, batch.body_positions, strict=True)],
            batch.keep_after,
            self._turned(addresses),
        )
        self.slots.tails[batch.slots] = conv.tails
        for part in batch.keep_after:
            snapshot = LinearSnapshot(result.kept[part], conv.kept[part])
            batch.kept.setdefault(part, []).append(snapshot)
        return self.projection.output(result.outputs.to(hidden.dtype), projected)

    def decode(self, hidden: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """See `Mixer`; advances every request's state slot by one token."""
        projected = self.projection.project(hidden)
        rows = projected.rows
        if self.projection.conv is not None:
            rows = short_conv.step(rows, self.projection.conv, self.slots.tails, batch.slots)
        inputs = self._inputs(rows, projected, batch.queries.positions)
        outputs = recurrence.step(inputs, self.slots.states, batch.slots)
        return self.projection.output(outputs.to(hidden.dtype), projected)

    def _convolve(
        self,
        rows: torch.Tensor,
        walk: PartWalk,
        tails: torch.Tensor,
        body_tails: Sequence[torch.Tensor | None],
        keep_after: frozenset[int] = frozenset(),
        addresses: BodyAddresses | None = None,
    ) -> ConvResult:
        """Behind the convolution; without one rows pass as they are and tails stay empty."""
        if self.projection.conv is None:
            return ConvResult(rows, tails, dict.fromkeys(keep_after, tails[0]))
        return short_conv.walk(rows, self.projection.conv, walk, tails, body_tails, keep_after, addresses)

    def _inputs(self, rows: torch.Tensor, projected: Projected, positions: torch.Tensor) -> RecurrenceInputs:
        inputs = self.projection.inputs(rows, projected)
        if self.rotary is None:
            return inputs
        q, k = self.rotary.rotate(inputs.q, positions), self.rotary.rotate(inputs.k, positions)
        return replace(inputs, q=q, k=k)

    def _turned(self, addresses: BodyAddresses | None) -> BodyAddresses | None:
        if addresses is None or self.rotary is None:
            return addresses
        return recurrence.turn_bodies(addresses, self.rotary, self.slots.states)

    def _body(self, plane: LinearPlane | None, position: int, addresses: BodyAddresses | None) -> Body | None:
        """Kernels that read bodies by address turn them themselves."""
        if plane is None:
            return None
        if self.rotary is None or addresses is not None:
            return Body(plane.transition, plane.end_state)
        return Body(plane.transition, self.rotary.rotate_state(plane.end_state, position))


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[n, …]` to read; what is one and the same, as the prime's state is for all segments, is not copied."""
    first = tensors[0]
    if all(tensor is first for tensor in tensors):
        return first.expand(len(tensors), *first.shape)
    return torch.stack(list(tensors))


def _transitions(shape: StateShape, carries: Sequence[LinearCarry]) -> torch.Tensor | None:
    """The transitions so far, `[n, …]`; None where no body has begun, others begin with the identity."""
    if all(carry.transition is None for carry in carries):
        return None
    identity = shape.identity(carries[0].state.device)
    return torch.stack([identity if carry.transition is None else carry.transition for carry in carries])
