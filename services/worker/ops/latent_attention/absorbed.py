"""The op over latents as they are stored: all heads share them as keys and as values. Any float dtype."""

import torch

from services.worker.ops.latent_attention.types import Expansion
from services.worker.ops.paged_attention import AttentionShape, PagedQueries
from services.worker.ops.paged_attention import dispatch as paged_attention

__all__ = ["attend"]


def attend(
    queries: torch.Tensor,
    asked: PagedQueries,
    pools: tuple[torch.Tensor, torch.Tensor],
    shape: AttentionShape,
    expansion: Expansion,
) -> torch.Tensor:
    """Attention of packed queries `[N, H, R + P]`; returns `[N, H, V]`.

    pools: keys `[pages, page_size, 1, R + C]` and, as a view of their last channels, values; see `paged_attention.naive`.
    """
    mixed = paged_attention.attend(expansion.absorb(queries), asked, pools, shape)
    return expansion.expand(mixed)
