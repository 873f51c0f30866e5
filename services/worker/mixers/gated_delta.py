"""Gated DeltaNet: short convolution, gated delta rule, gated norm (Qwen3.5 and Qwen3-Next linear layers)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from services.worker.mixers.batch import (
    CaptureBatch,
    CombineBatch,
    DecodeBatch,
    LinearCarry,
    LinearPlane,
    LinearSlots,
    LinearSnapshot,
)
from services.worker.ops.delta_rule import DeltaInputs
from services.worker.ops.delta_rule import chunked as delta_rule
from services.worker.ops.layout import Body, PartWalk
from services.worker.ops.norm import gated_rms_norm, l2_norm
from services.worker.ops.short_conv import chunked as short_conv

__all__ = ["GatedDelta", "GatedDeltaShape", "GatedDeltaWeights"]


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    """Heads and channels; `conv_taps` is the width of the short convolution."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int
    eps: float

    @property
    def conv_channels(self) -> int:
        """Channels of `[q | k | v]`."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """in_proj `[qkv + z + b + a, hidden]` fused; conv `[C, taps]`; decay_rate, dt_bias `[Hv]` fp32; norm `[V]`."""

    in_proj: torch.Tensor
    conv: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    out_proj: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Projected:
    """qkv `[N, C]` before convolution; gate `[N, Hv, V]`; beta, log_decay `[N, Hv]` fp32."""

    qkv: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    log_decay: torch.Tensor


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """One layer. `linear_layer` is its index among the linear layers; `slots` holds its running states."""

    shape: GatedDeltaShape
    weights: GatedDeltaWeights
    linear_layer: int
    slots: LinearSlots

    def capture(self, hidden: torch.Tensor, batch: CaptureBatch) -> torch.Tensor:
        """See `Mixer`; advances every segment's carry."""
        projected = self._project(hidden)
        carries = batch.carries_of(self.linear_layer)
        num_runs = len(carries)
        conv = short_conv.walk(
            projected.qkv,
            self.weights.conv,
            PartWalk(batch.cu_runs, tuple(range(num_runs + 1))),
            torch.stack([carry.tail for carry in carries]),
            [None] * num_runs,
        )
        inputs = self._delta_inputs(conv.outputs, projected)
        outputs = torch.empty_like(inputs.v)
        splits = [start + seam for start, seam in zip(batch.cu_runs[:-1], batch.seam_tokens, strict=True)]
        for run, carry in enumerate(carries):
            carry.tail = conv.tails[run]
        _scan_seams(inputs, [slice(*run) for run in zip(batch.cu_runs[:-1], splits, strict=True)], carries, outputs)
        _scan_bodies(inputs, [slice(*run) for run in zip(splits, batch.cu_runs[1:], strict=True)], carries, outputs)
        return self._finish(outputs, projected.gate)

    def combine(self, hidden: torch.Tensor, batch: CombineBatch) -> torch.Tensor:
        """See `Mixer`; advances the requests' state slots over live runs and stored bodies."""
        projected = self._project(hidden)
        planes = batch.planes_of(self.linear_layer)
        conv = short_conv.walk(
            projected.qkv,
            self.weights.conv,
            batch.walk,
            self.slots.tails[batch.slots],
            [None if plane is None else plane.tail for plane in planes],
            batch.keep_after,
        )
        result = delta_rule.walk(
            self._delta_inputs(conv.outputs, projected),
            batch.walk,
            self.slots.states[batch.slots],
            _bodies(planes),
            batch.keep_after,
        )
        self.slots.states[batch.slots] = result.states
        self.slots.tails[batch.slots] = conv.tails
        for part in batch.keep_after:
            snapshot = LinearSnapshot(result.kept[part], conv.kept[part])
            batch.kept.setdefault(part, []).append(snapshot)
        return self._finish(result.outputs.to(hidden.dtype), projected.gate)

    def decode(self, hidden: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """See `Mixer`; advances every request's state slot by one token."""
        projected = self._project(hidden)
        conv = short_conv.step(projected.qkv, self.weights.conv, self.slots.tails[batch.slots])
        inputs = self._delta_inputs(conv.outputs, projected)
        result = delta_rule.step(inputs, self.slots.states[batch.slots])
        self.slots.states[batch.slots] = result.states
        self.slots.tails[batch.slots] = conv.tails
        return self._finish(result.outputs.to(hidden.dtype), projected.gate)

    def _project(self, hidden: torch.Tensor) -> _Projected:
        shape = self.shape
        value_channels = shape.num_value_heads * shape.value_dim
        qkv, gate, beta, step = F.linear(hidden, self.weights.in_proj).split(
            [shape.conv_channels, value_channels, shape.num_value_heads, shape.num_value_heads], dim=-1
        )
        return _Projected(
            qkv=qkv,
            gate=gate.unflatten(-1, (shape.num_value_heads, shape.value_dim)),
            beta=beta.float().sigmoid(),
            log_decay=-self.weights.decay_rate * F.softplus(step.float() + self.weights.dt_bias),
        )

    def _delta_inputs(self, convolved: torch.Tensor, projected: _Projected) -> DeltaInputs:
        """Recurrence inputs in fp32, key heads repeated to value heads, queries scaled by `K^−½`."""
        shape = self.shape
        key_channels = shape.num_key_heads * shape.key_dim
        value_channels = shape.num_value_heads * shape.value_dim
        activated = F.silu(convolved).float()
        q, k, v = activated.split([key_channels, key_channels, value_channels], dim=-1)
        repeats = shape.num_value_heads // shape.num_key_heads
        q = l2_norm(q.unflatten(-1, (-1, shape.key_dim))) * shape.key_dim**-0.5
        k = l2_norm(k.unflatten(-1, (-1, shape.key_dim)))
        return DeltaInputs(
            q=q.repeat_interleave(repeats, dim=1),
            k=k.repeat_interleave(repeats, dim=1),
            v=v.unflatten(-1, (-1, shape.value_dim)),
            log_decay=projected.log_decay,
            beta=projected.beta,
        )

    def _finish(self, outputs: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = gated_rms_norm(outputs.to(gate.dtype), gate, self.weights.norm, self.shape.eps)
        return F.linear(normed.flatten(-2), self.weights.out_proj)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Those of several runs that have tokens: their tokens packed, offsets of each, and whose they are."""

    inputs: DeltaInputs
    tokens: slice | torch.Tensor
    cu_runs: tuple[int, ...]
    carries: tuple[LinearCarry, ...]


def _pack_runs(inputs: DeltaInputs, runs: Sequence[slice], carries: Sequence[LinearCarry]) -> _Runs | None:
    present = [(run, carry) for run, carry in zip(runs, carries, strict=True) if run.stop > run.start]
    if not present:
        return None
    cu_runs = (0, *accumulate(run.stop - run.start for run, _ in present))
    tokens: slice | torch.Tensor = present[0][0]
    if len(present) > 1:
        places = torch.cat([torch.arange(run.start, run.stop) for run, _ in present])
        tokens = places.to(inputs.q.device)
    return _Runs(inputs[tokens], tokens, cu_runs, tuple(carry for _, carry in present))


def _scan_seams(
    inputs: DeltaInputs, runs: Sequence[slice], carries: Sequence[LinearCarry], outputs: torch.Tensor
) -> None:
    packed = _pack_runs(inputs, runs, carries)
    if packed is None:
        return
    result = delta_rule.scan(packed.inputs, packed.cu_runs, torch.stack([own.state for own in packed.carries]), None)
    outputs[packed.tokens] = result.outputs
    for carry, state in zip(packed.carries, result.states, strict=True):
        carry.state = state


def _scan_bodies(
    inputs: DeltaInputs, runs: Sequence[slice], carries: Sequence[LinearCarry], outputs: torch.Tensor
) -> None:
    packed = _pack_runs(inputs, runs, carries)
    if packed is None:
        return
    states = torch.stack([carry.state for carry in packed.carries])
    transitions = torch.stack([_transition(carry) for carry in packed.carries])
    result = delta_rule.scan(packed.inputs, packed.cu_runs, states, transitions)
    if result.transitions is None:
        raise RuntimeError("the scan lost its transitions")
    outputs[packed.tokens] = result.outputs
    log_decays = packed.inputs.log_decay.split([end - start for start, end in pairwise(packed.cu_runs)])
    for carry, state, transition, decays in zip(
        packed.carries, result.states, result.transitions, log_decays, strict=True
    ):
        carry.state, carry.transition = state, transition
        carry.log_decays.append(decays)


def _transition(carry: LinearCarry) -> torch.Tensor:
    """The transition so far; a body that begins here starts from the identity."""
    if carry.transition is None:
        carry.seam_state = carry.state
        heads, keys = carry.state.shape[:2]
        return torch.eye(keys, device=carry.state.device).expand(heads, keys, keys)
    return carry.transition


def _bodies(planes: Sequence[LinearPlane | None]) -> list[Body | None]:
    return [None if plane is None else Body(plane.transition, plane.end_state) for plane in planes]
