"""Multi-head latent attention: of one latent a token, every head makes its key and its value.

A token keeps `[positional key | latent]`. In the textbook form (arXiv 2405.04434, §2.1) a head's key is
`[W_uk latent | positional key]` and its value `W_uv latent`; since `q · (W_uk c) = (W_ukᵀ q) · c`, queries may go through
`W_ukᵀ` ahead of attention and outputs through `W_uv` behind it, so that latents need not be expanded.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from services.worker.mixers.paged_attention import Heads
from services.worker.mixers.shapes import PageShape
from services.worker.mixers.share import Share
from services.worker.ops.latent_attention import Expansion
from services.worker.ops.norm import rms_norm

__all__ = ["LatentAttention", "LatentAttentionShape", "LatentAttentionWeights"]


@dataclass(frozen=True, slots=True)
class LatentAttentionShape:
    """Heads and channels of a head: nope_dim without and rope_dim with position in queries and keys, value_dim in values.

    latent_dim: the rank of keys and values; query_rank: that of queries, None where they are projected at once.
    rotary_theta: None where the positional channels are not turned either; eps: of the norms of the latents.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    query_rank: int | None
    rotary_theta: float | None
    eps: float

    @property
    def query_dim(self) -> int:
        """Channels of one head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def kept(self) -> PageShape:
        """The positional key ahead of the latent."""
        return PageShape(1, self.rope_dim + self.latent_dim, self.latent_dim, latent=True)

    def split(self, share: Share) -> "LatentAttentionShape":
        """See `MixerShape`: the latents, which all heads attend to, are every rank's."""
        return replace(self, num_heads=share.of(self.num_heads, "attention heads"))


@dataclass(frozen=True, slots=True)
class LatentAttentionWeights:
    """in_proj: rows of the queries, or of their latent, then of the latent `[C]` and the positional key `[R]`.

    key_up `[H, nope_dim, C]` and value_up `[H, C, value_dim]` in the order of their products; query_norm `[query_rank]` and
    query_up `[H · query_dim, query_rank]` are None where queries are projected at once.
    """

    in_proj: torch.Tensor
    latent_norm: torch.Tensor
    key_up: torch.Tensor
    value_up: torch.Tensor
    out_proj: torch.Tensor
    query_norm: torch.Tensor | None = None
    query_up: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One layer's projections; see `AttentionProjection`."""

    shape: LatentAttentionShape
    weights: LatentAttentionWeights

    @property
    def scale(self) -> float:
        """`(nope_dim + rope_dim)^−½`: absorption changes no score."""
        return float(self.shape.query_dim**-0.5)

    @property
    def key_norm(self) -> None:
        """See `AttentionProjection`: of a key only the latent is normed, before the positional channels join it."""
        return None

    def project(self, hidden: torch.Tensor) -> Heads:
        """See `AttentionProjection`: queries `[N, H, R + P]`, keys `[N, 1, R + C]`, positional channels first."""
        shape, weights = self.shape, self.weights
        kept = shape.latent_dim + shape.rope_dim
        projected = F.linear(hidden, weights.in_proj)
        queries, latent, positional = projected.split(
            [projected.shape[-1] - kept, shape.latent_dim, shape.rope_dim], dim=-1
        )
        latent = rms_norm(latent, weights.latent_norm, shape.eps)
        q = self._expand_queries(queries).unflatten(-1, (shape.num_heads, shape.query_dim))
        plain, turned = q.split([shape.nope_dim, shape.rope_dim], dim=-1)
        return Heads(
            q=torch.cat([turned, plain], dim=-1),
            k=torch.cat([positional, latent], dim=-1)[:, None],
            v=None,
            expansion=Expansion(weights.key_up, weights.value_up),
        )

    def output(self, mixed: torch.Tensor, heads: Heads) -> torch.Tensor:
        """See `AttentionProjection`."""
        return F.linear(mixed.flatten(-2), self.weights.out_proj)

    def _expand_queries(self, queries: torch.Tensor) -> torch.Tensor:
        if self.weights.query_up is None or self.weights.query_norm is None:
            return queries
        return F.linear(rms_norm(queries, self.weights.query_norm, self.shape.eps), self.weights.query_up)
