"""Lightning attention: linear attention whose decays are fixed by head and layer (MiniMax-M1, Ring-linear, Ring-2.5).

Source: Qin et al., Lightning Attention-2 (arXiv 2401.04658); slopes as in Press et al., ALiBi (arXiv 2108.12409).
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from services.worker.mixers.linear import LinearMixer, Projected
from services.worker.mixers.shapes import StateShape, TransitionKind
from services.worker.mixers.share import Share
from services.worker.mixers.state import DeviceMemory
from services.worker.ops.norm import grouped_rms_norm, rms_norm
from services.worker.ops.recurrence import RecurrenceInputs
from services.worker.ops.rotary import Rotary

__all__ = ["Lightning", "LightningShape", "LightningWeights", "alibi_slopes", "create_lightning", "layer_slopes"]


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """`2^(−8 (h + 1) / H)` for a power of two; else those of the power below, then every second one of the power above."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = tuple(2 ** (-8 * (head + 1) / power) for head in range(power))
    if power == num_heads:
        return slopes
    return slopes + alibi_slopes(2 * power)[::2][: num_heads - power]


def layer_slopes(num_heads: int, layer: int, num_layers: int, offset: int = 0) -> tuple[float, ...]:
    """A layer's decay rates, of one token: `alibi · (1 − (layer − offset) / (num_layers − 1) + 1e-5)`, layers from 0."""
    factor = 1 - (layer - offset) / max(num_layers - 1, 1) + 1e-5
    return tuple(slope * factor for slope in alibi_slopes(num_heads))


@dataclass(frozen=True, slots=True)
class LightningShape:
    """Heads of head_dim channels, as many keys as queries, and one layer's decay rates.

    slopes: `−ln a` of every head; query_scale: the factor on queries; activated: q, k and v pass through SiLU;
    norm_groups: in how many runs of channels outputs are normed, with norm_eps; eps: of query and key norms; rotary_dim
    leading channels of queries and keys carry position, none by default.
    """

    head_dim: int
    slopes: tuple[float, ...]
    query_scale: float
    activated: bool
    norm_groups: int
    norm_eps: float
    eps: float
    rotary_dim: int = 0
    rotary_theta: float = 1e4

    @property
    def num_heads(self) -> int:
        """One slope a head."""
        return len(self.slopes)

    @property
    def channels(self) -> int:
        """Channels of q, of k and of v."""
        return self.num_heads * self.head_dim

    @property
    def kept(self) -> StateShape:
        """A square state a head; its transition is a number."""
        return StateShape(self.num_heads, self.head_dim, self.head_dim, TransitionKind.SCALAR)

    def split(self, share: Share) -> "LightningShape":
        """See `MixerShape`: a run of channels that is normed together stays on one rank."""
        heads = share.of(self.num_heads, "linear heads")
        groups = share.of(self.norm_groups, "norm groups of a linear layer's output")
        slopes = self.slopes[share.index * heads : (share.index + 1) * heads]
        return replace(self, slopes=slopes, norm_groups=groups)


@dataclass(frozen=True, slots=True)
class LightningWeights:
    """in_proj `[q + k + v + gate, hidden]` fused; norm `[H · D]`; q_norm, k_norm `[D]`, None where the family has none."""

    in_proj: torch.Tensor
    norm: torch.Tensor
    out_proj: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Lightning:
    """One layer's projections; see `LinearProjection`. The gate is `[N, H · D]`; log_decay `[H]` is `−slopes`, fp32."""

    shape: LightningShape
    weights: LightningWeights
    log_decay: torch.Tensor

    @property
    def conv(self) -> None:
        """See `LinearProjection`: lightning attention has no convolution."""
        return

    @property
    def decays_channels(self) -> bool:
        """See `LinearProjection`."""
        return False

    @property
    def erases(self) -> bool:
        """See `LinearProjection`."""
        return False

    def project(self, hidden: torch.Tensor) -> Projected:
        """See `LinearProjection`."""
        channels = self.shape.channels
        qkv, gate = F.linear(hidden, self.weights.in_proj).split([3 * channels, channels], dim=-1)
        return Projected(rows=qkv, gate=gate, gates=(self.log_decay.expand(hidden.shape[0], -1),))

    def inputs(self, rows: torch.Tensor, projected: Projected) -> RecurrenceInputs:
        """See `LinearProjection`."""
        activated = F.silu(rows) if self.shape.activated else rows
        q, k, v = activated.unflatten(-1, (3, self.shape.num_heads, self.shape.head_dim)).unbind(1)
        return RecurrenceInputs(
            q=self._norm(q, self.weights.q_norm).float() * self.shape.query_scale,
            k=self._norm(k, self.weights.k_norm).float(),
            v=v.float(),
            log_decay=projected.gates[0],
            beta=None,
        )

    def output(self, mixed: torch.Tensor, projected: Projected) -> torch.Tensor:
        """See `LinearProjection`: the norm comes before the sigmoid gate."""
        normed = grouped_rms_norm(mixed.flatten(-2), self.weights.norm, self.shape.norm_groups, self.shape.norm_eps)
        return F.linear(normed * projected.gate.sigmoid(), self.weights.out_proj)

    def _norm(self, heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return heads if weight is None else rms_norm(heads, weight, self.shape.eps)


def create_lightning(shape: LightningShape, weights: LightningWeights, memory: DeviceMemory) -> LinearMixer:
    """One layer with its decays, its positions and the running states that it takes from `memory`."""
    log_decay = -torch.tensor(shape.slopes, dtype=torch.float32, device=memory.device)
    rotary = Rotary.create(shape.rotary_theta, shape.rotary_dim, memory.device) if shape.rotary_dim else None
    slots = memory.add_linear_slots(shape.kept)
    return LinearMixer(shape.kept, Lightning(shape, weights, log_decay), rotary, slots)
