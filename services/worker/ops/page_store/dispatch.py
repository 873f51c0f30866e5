"""Storing tokens in the best form that a device has."""

import torch

from services.worker.ops.device import runs_kernels
from services.worker.ops.page_store import naive
from services.worker.ops.page_store.types import FreshTokens, KeyForm
from services.worker.ops.paged_attention import PagedQueries

__all__ = ["store"]


def store(
    tokens: FreshTokens, asked: PagedQueries, base: int, pools: tuple[torch.Tensor, torch.Tensor], form: KeyForm
) -> None:
    """As `naive.store`."""
    if not runs_kernels(tokens.keys):
        naive.store(tokens, asked, base, pools, form)
        return
    from services.worker.ops.page_store import triton

    triton.store(tokens, asked, base, pools, form)
