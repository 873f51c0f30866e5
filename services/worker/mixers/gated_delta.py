"""Gated DeltaNet: short convolution, gated delta rule, gated norm (Qwen3.5 and Qwen3-Next linear layers)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.worker.mixers.linear import Projected
from services.worker.mixers.shapes import StateShape, TransitionKind
from services.worker.ops.norm import gated_rms_norm, l2_norm
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
    def conv_channels(self) -> int:
        """Channels of `[q | k | v]`."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

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
    """One layer's projections; see `LinearProjection`. The gate is `[N, Hv, V]`."""

    shape: GatedDeltaShape
    weights: GatedDeltaWeights

    @property
    def conv(self) -> torch.Tensor:
        """See `LinearProjection`."""
        return self.weights.conv

    def project(self, hidden: torch.Tensor) -> Projected:
        """See `LinearProjection`."""
        shape = self.shape
        value_channels = shape.num_value_heads * shape.value_dim
        qkv, gate, beta, step = F.linear(hidden, self.weights.in_proj).split(
            [shape.conv_channels, value_channels, shape.num_value_heads, shape.num_value_heads], dim=-1
        )
        return Projected(
            rows=qkv,
            gate=gate.unflatten(-1, (shape.num_value_heads, shape.value_dim)),
            log_decay=-self.weights.decay_rate * F.softplus(step.float() + self.weights.dt_bias),
            beta=beta.float().sigmoid(),
        )

    def inputs(self, rows: torch.Tensor, projected: Projected) -> RecurrenceInputs:
        """See `LinearProjection`: key heads repeated to value heads, queries scaled by `K^−½`."""
        shape = self.shape
        key_channels = shape.num_key_heads * shape.key_dim
        value_channels = shape.num_value_heads * shape.value_dim
        activated = F.silu(rows).float()
        q, k, v = activated.split([key_channels, key_channels, value_channels], dim=-1)
        repeats = shape.num_value_heads // shape.num_key_heads
        q = l2_norm(q.unflatten(-1, (-1, shape.key_dim))) * shape.key_dim**-0.5
        k = l2_norm(k.unflatten(-1, (-1, shape.key_dim)))
        return RecurrenceInputs(
            q=q.repeat_interleave(repeats, dim=1),
            k=k.repeat_interleave(repeats, dim=1),
            v=v.unflatten(-1, (-1, shape.value_dim)),
            log_decay=projected.log_decay,
            beta=projected.beta,
        )

    def output(self, mixed: torch.Tensor, projected: Projected) -> torch.Tensor:
        """See `LinearProjection`."""
        normed = gated_rms_norm(mixed, projected.gate, self.weights.norm, self.shape.eps)
        return F.linear(normed.flatten(-2), self.weights.out_proj)
