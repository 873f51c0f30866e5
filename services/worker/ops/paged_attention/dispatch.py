"""Paged attention in the best form that a device has."""

import torch

from services.worker.ops.device import has_kernels
from services.worker.ops.paged_attention import chunked, padded
from services.worker.ops.paged_attention.types import AttentionShape, PagedQueries

__all__ = ["attend", "takes_kernel"]

# Wider heads (those of latents) do not fit a tile of the kernel.
_WIDEST_HEAD = 256


def takes_kernel(device: torch.device, key_dim: int, page_tokens: int) -> bool:
    """Whether a device runs the kernel over such keys and pages."""
    has_tile = page_tokens >= 16 and page_tokens.bit_count() == 1 and key_dim <= _WIDEST_HEAD
    return has_tile and has_kernels(device)


def attend(
    queries: torch.Tensor, asked: PagedQueries, pools: tuple[torch.Tensor, torch.Tensor], shape: AttentionShape
) -> torch.Tensor:
    """As `naive.attend`; each request's positions must rise."""
    if takes_kernel(queries.device, queries.shape[-1], pools[0].shape[1]):
        from services.worker.ops.paged_attention import triton

        return triton.attend(queries, asked, pools, shape)
    if queries.is_cuda:
        return padded.attend(queries, asked, pools, shape)
    return chunked.attend(queries, asked, pools, shape)
