"""Grouped-query attention, with query and key norms and an output gate where the family has them."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from services.worker.mixers.paged_attention import Heads, PagedAttention
from services.worker.mixers.shapes import PageShape
from services.worker.mixers.share import Share
from services.worker.mixers.state import DeviceMemory
from services.worker.ops.gate import sigmoid_gate
from services.worker.ops.norm import rms_norm
from services.worker.ops.page_store import KeyNorm
from services.worker.ops.rotary import Llama3Scaling, Rotary

__all__ = ["AttentionWeights", "GroupedAttention", "GroupedAttentionShape", "create_grouped_attention"]


@dataclass(frozen=True, slots=True)
class GroupedAttentionShape:
    """Heads and channels; rotary_dim leading channels of a head carry position; gated: `q_proj` is `[q | gate]` a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rotary_theta: float
    gated: bool
    eps: float
    rotary_scaling: Llama3Scaling | None = None

    @property
    def kept(self) -> PageShape:
        """Keys and values."""
        return PageShape(self.num_kv_heads, self.head_dim, self.head_dim)

    def split(self, share: Share) -> "GroupedAttentionShape":
        """See `MixerShape`: where key and value heads are fewer than ranks, several ranks hold the same one."""
        heads = share.of(self.num_heads, "attention heads")
        keys = self.key_share(share).of(self.num_kv_heads, "key and value heads")
        return replace(self, num_heads=heads, num_kv_heads=keys)

    def key_share(self, share: Share) -> Share:
        """Which keys and values a share of the queries attends to.

        Raises:
            SplitError: shares would not be equal.
        """
        return share.among(self.num_kv_heads, "key and value heads")


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """in_proj: rows of q (and gate), k, v fused; q_norm, k_norm `[D]`, None where the family has none."""

    in_proj: torch.Tensor
    out_proj: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """One layer's projections; see `AttentionProjection`."""

    shape: GroupedAttentionShape
    weights: AttentionWeights

    @property
    def scale(self) -> float:
        """`D^−½`."""
        return float(self.shape.head_dim**-0.5)

    @property
    def key_norm(self) -> KeyNorm | None:
        """See `AttentionProjection`."""
        weight = self.weights.k_norm
        return None if weight is None else KeyNorm(weight, self.shape.eps)

    def project(self, hidden: torch.Tensor) -> Heads:
        """See `AttentionProjection`."""
        shape = self.shape
        query_width = shape.num_heads * shape.head_dim * (2 if shape.gated else 1)
        kv_width = shape.num_kv_heads * shape.head_dim
        q, k, v = F.linear(hidden, self.weights.in_proj).split([query_width, kv_width, kv_width], dim=-1)
        q = q.unflatten(-1, (shape.num_heads, -1))
        gate = None
        if shape.gated:
            q, gate = q.split(shape.head_dim, dim=-1)
        k = k.unflatten(-1, (shape.num_kv_heads, -1))
        v = v.unflatten(-1, (shape.num_kv_heads, -1))
        if self.weights.q_norm is not None:
            q = rms_norm(q, self.weights.q_norm, shape.eps)
        return Heads(q, k, v, gate)

    def output(self, mixed: torch.Tensor, heads: Heads) -> torch.Tensor:
        """See `AttentionProjection`."""
        flat = mixed.flatten(-2) if heads.gate is None else sigmoid_gate(mixed, heads.gate)
        return F.linear(flat, self.weights.out_proj)


def create_grouped_attention(
    shape: GroupedAttentionShape, weights: AttentionWeights, memory: DeviceMemory
) -> PagedAttention:
    """One layer with its positions and the pages that it takes from `memory`."""
    rotary = Rotary.create(shape.rotary_theta, shape.rotary_dim, memory.device, scaling=shape.rotary_scaling)
    return PagedAttention(GroupedAttention(shape, weights), rotary, memory.add_page_pool(shape.kept))
