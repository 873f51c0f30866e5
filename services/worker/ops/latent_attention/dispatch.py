"""Latent attention in the form that costs least."""

import torch

from services.worker.ops.latent_attention import absorbed, expanded
from services.worker.ops.latent_attention.types import Expansion
from services.worker.ops.paged_attention import AttentionShape, PagedQueries
from services.worker.ops.paged_attention.dispatch import takes_kernel

__all__ = ["attend"]


def attend(
    queries: torch.Tensor,
    asked: PagedQueries,
    pools: tuple[torch.Tensor, torch.Tensor],
    shape: AttentionShape,
    expansion: Expansion,
) -> torch.Tensor:
    """As `absorbed.attend`; what is recorded for other tables too is absorbed, whatever it costs."""
    takes_heads = not asked.is_fixed and takes_kernel(queries.device, queries.shape[-1], pools[0].shape[1])
    form = expanded if takes_heads and expanded.is_cheaper(asked, expansion) else absorbed
    attended: torch.Tensor = form.attend(queries, asked, pools, shape, expansion)
    return attended
