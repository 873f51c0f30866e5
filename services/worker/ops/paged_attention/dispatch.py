"""Paged attention in the best form that a device has."""

from types import ModuleType

import torch

from services.worker.ops.device import has_kernels
from services.worker.ops.paged_attention import chunked, padded
from services.worker.ops.paged_attention.types import AttentionShape, PagedQueries

__all__ = ["attend", "takes_kernel"]

# Wider heads do not fit a tile of the kernel, and latents have one of their own.
_WIDEST_HEAD = 256


def takes_kernel(device: torch.device, key_dim: int, page_tokens: int, latent_dim: int | None = None) -> bool:
    """Whether a device runs a kernel over such keys and pages; latent_dim: of keys that hold their values, else None."""
    if not has_kernels(device):
        return False
    from services.worker.ops.paged_attention import triton_latent

    has_tile = key_dim <= _WIDEST_HEAD if latent_dim is None else triton_latent.fits(key_dim, latent_dim)
    return has_tile and page_tokens >= 16 and page_tokens.bit_count() == 1


def attend(
    queries: torch.Tensor, asked: PagedQueries, pools: tuple[torch.Tensor, torch.Tensor], shape: AttentionShape
) -> torch.Tensor:
    """As `naive.attend`; each request's positions must rise."""
    attended: torch.Tensor = _form(queries, pools).attend(queries, asked, pools, shape)
    return attended


def _form(queries: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]) -> ModuleType:
    keys, values = pools
    latent_dim = values.shape[-1] if _holds(keys, values) else None
    if takes_kernel(queries.device, keys.shape[-1], keys.shape[1], latent_dim):
        from services.worker.ops.paged_attention import triton, triton_latent

        return triton if latent_dim is None else triton_latent
    return padded if queries.is_cuda else chunked


def _holds(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the values of one head are the last channels of its keys, not only like them."""
    if keys.shape[2] != 1 or keys.stride() != values.stride():
        return False
    return values.data_ptr() == keys.data_ptr() + (keys.shape[-1] - values.shape[-1]) * keys.itemsize
