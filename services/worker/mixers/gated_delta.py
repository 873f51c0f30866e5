"""Gated DeltaNet: short convolution, gated delta rule, gated norm (Qwen3.5 and Qwen3-Next linear layers)."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from services.worker.mixers.linear import Projected
from services.worker.mixers.shapes import StateShape, TransitionKind
from services.worker.mixers.share import Share
from services.worker.ops.delta_gates import DeltaGates, DeltaHeads, open_gates
from services.worker.ops.norm import gated_rms_norm
from services.worker.ops.recurrence import RecurrenceInputs

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
    def heads(self) -> DeltaHeads:
        """As the way into the recurrence takes them."""
        return DeltaHeads(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim)

    @property
    def conv_channels(self) -> int:
        """Channels of `[q | k | v]`."""
        return sum(self.conv_runs)

    @property
    def conv_runs(self) -> tuple[int, int, int]:
        """Channels of q, of k and of v."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def kept(self) -> StateShape:
        """One state a value head."""
        return StateShape(
            num_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            transition=TransitionKind.DENSE,
            conv_taps=self.conv_taps,
            conv_channels=self.conv_channels,
        )

    def split(self, share: Share) -> "GatedDeltaShape":
        """See `MixerShape`: key heads go with the value heads that they serve."""
        keys = share.of(self.num_key_heads, "linear key heads")
        values = share.of(self.num_value_heads, "linear value heads")
        return replace(self, num_key_heads=keys, num_value_heads=values)


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
class GatedDelta:
    """One layer's projections; see `LinearProjection`. The gate is `[N, Hv, V]`; gates are steps and betas `[N, Hv]`."""

    shape: GatedDeltaShape
    weights: GatedDeltaWeights

    @property
    def conv(self) -> torch.Tensor:
        """See `LinearProjection`."""
        return self.weights.conv

    @property
    def decays_channels(self) -> bool:
        """See `LinearProjection`."""
        return False

    @property
    def erases(self) -> bool:
        """See `LinearProjection`."""
        return True

    def project(self, hidden: torch.Tensor) -> Projected:
        """See `LinearProjection`."""
        shape = self.shape
        value_channels = shape.num_value_heads * shape.value_dim
        rows, gate, beta, step = F.linear(hidden, self.weights.in_proj).split(
            [shape.conv_channels, value_channels, shape.num_value_heads, shape.num_value_heads], dim=-1
        )
        return Projected(rows, gate.unflatten(-1, (shape.num_value_heads, shape.value_dim)), (step, beta))

    def inputs(self, rows: torch.Tensor, projected: Projected) -> RecurrenceInputs:
        """See `LinearProjection`: queries scaled by `K^−½`."""
        step, beta = projected.gates
        gates = DeltaGates(step, beta, self.weights.decay_rate, self.weights.dt_bias)
        return open_gates(rows, gates, self.shape.heads)

    def output(self, mixed: torch.Tensor, projected: Projected) -> torch.Tensor:
        """See `LinearProjection`."""
        normed = gated_rms_norm(mixed, projected.gate, self.weights.norm, self.shape.eps)
        return F.linear(normed.flatten(-2), self.weights.out_proj)
