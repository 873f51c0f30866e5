"""Kimi delta attention: short convolution, delta rule with a decay for every key channel, gated norm (Kimi-Linear).

Source: arXiv 2510.26692, §3. A head's channels decay by `g = −e^(A_log) · softplus(f_b f_a x + dt_bias)`; its output is
normed, then multiplied with `sigmoid(g_b g_a x)`.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from services.worker.mixers.linear import Projected
from services.worker.mixers.shapes import StateShape, TransitionKind
from services.worker.mixers.share import Share
from services.worker.ops.norm import l2_norm, rms_norm
from services.worker.ops.recurrence import RecurrenceInputs

__all__ = ["KimiDelta", "KimiDeltaShape", "KimiDeltaWeights"]


@dataclass(frozen=True, slots=True)
class KimiDeltaShape:
    """Heads of `head_dim` channels in queries, keys and values alike; `conv_taps` is the width of the short convolution."""

    num_heads: int
    head_dim: int
    conv_taps: int
    eps: float

    @property
    def channels(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kept(self) -> StateShape:
        """One square state a head."""
        return StateShape(
            num_heads=self.num_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            transition=TransitionKind.DENSE,
            conv_taps=self.conv_taps,
            conv_channels=3 * self.channels,
        )

    def split(self, share: Share) -> "KimiDeltaShape":
        """See `MixerShape`."""
        return replace(self, num_heads=share.of(self.num_heads, "linear heads"))


@dataclass(frozen=True, slots=True)
class KimiDeltaWeights:
    """in_proj: rows of q, k, v `[3 H K]`, of the inner channels of decay and gate `[2 K]`, and of beta `[H]`, fused.

    conv `[3 H K, taps]`; decay_up, gate_up `[H K, K]`; decay_rate `[H, 1]`, dt_bias `[H, K]` fp32; norm `[K]`.
    """

    in_proj: torch.Tensor
    conv: torch.Tensor
    decay_up: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    gate_up: torch.Tensor
    norm: torch.Tensor
    out_proj: torch.Tensor


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """One layer's projections; see `LinearProjection`. Gate `[N, H, K]` behind its sigmoid; gates: log decays and betas."""

    shape: KimiDeltaShape
    weights: KimiDeltaWeights

    @property
    def conv(self) -> torch.Tensor:
        """See `LinearProjection`."""
        return self.weights.conv

    @property
    def decays_channels(self) -> bool:
        """See `LinearProjection`."""
        return True

    @property
    def erases(self) -> bool:
        """See `LinearProjection`."""
        return True

    def project(self, hidden: torch.Tensor) -> Projected:
        """See `LinearProjection`."""
        shape, weights = self.shape, self.weights
        qkv, decay, gate, beta = F.linear(hidden, weights.in_proj).split(
            [3 * shape.channels, shape.head_dim, shape.head_dim, shape.num_heads], dim=-1
        )
        steps = F.softplus(self._heads(F.linear(decay, weights.decay_up)).float() + weights.dt_bias)
        return Projected(
            rows=qkv,
            gate=self._heads(F.linear(gate, weights.gate_up)).sigmoid(),
            gates=(-weights.decay_rate * steps, beta.float().sigmoid()),
        )

    def inputs(self, rows: torch.Tensor, projected: Projected) -> RecurrenceInputs:
        """See `LinearProjection`: queries scaled by `K^−½`."""
        log_decay, beta = projected.gates
        q, k, v = (self._heads(part) for part in F.silu(rows).float().chunk(3, dim=-1))
        return RecurrenceInputs(
            q=l2_norm(q) * self.shape.head_dim**-0.5,
            k=l2_norm(k),
            v=v,
            log_decay=log_decay,
            beta=beta,
        )

    def output(self, mixed: torch.Tensor, projected: Projected) -> torch.Tensor:
        """See `LinearProjection`."""
        normed = rms_norm(mixed, self.weights.norm, self.shape.eps) * projected.gate
        return F.linear(normed.flatten(-2), self.weights.out_proj)

    def _heads(self, flat: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = flat.unflatten(-1, (self.shape.num_heads, self.shape.head_dim))
        return heads
