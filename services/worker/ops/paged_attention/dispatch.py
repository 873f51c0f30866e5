"""Paged attention in the best form that a device has."""

import torch

from services.worker.ops.device import runs_kernels
from services.worker.ops.paged_attention import chunked, padded
from services.worker.ops.paged_attention.types import AttentionShape, PagedQueries

__all__ = ["attend"]

# Wider heads (those of latents) do not fit a tile of the kernel.
_WIDEST_HEAD = 256


def attend(
    queries: torch.Tensor, asked: PagedQueries, pools: tuple[torch.Tensor, torch.Tensor], shape: AttentionShape
) -> torch.Tensor:
    """As `naive.attend`; each request's positions must rise."""
    if not queries.is_cuda:
        return chunked.attend(queries, asked, pools, shape)
    page_tokens = pools[0].shape[1]
    has_tile = page_tokens >= 16 and page_tokens.bit_count() == 1 and queries.shape[-1] <= _WIDEST_HEAD
    if not has_tile or not runs_kernels(queries):
        return padded.attend(queries, asked, pools, shape)
    from services.worker.ops.paged_attention import triton

    return triton.attend(queries, asked, pools, shape)
