"""Storing tokens as torch operations, the form of every device without kernels. Any float dtype."""

import torch

from services.worker.ops.norm import naive as norm
from services.worker.ops.page_store.types import FreshTokens, KeyForm
from services.worker.ops.paged_attention import PagedQueries

__all__ = ["store"]


def store(
    tokens: FreshTokens, asked: PagedQueries, base: int, pools: tuple[torch.Tensor, torch.Tensor], form: KeyForm
) -> None:
    """Write tokens, one a query of `asked`, into pools of keys and values `[pages, page_size, Hkv, D]`.

    base: the true position at which the stored rotation is zero.
    """
    keys = tokens.keys
    if form.norm is not None:
        keys = norm.rms_norm(keys, form.norm.weight, form.norm.eps)
    if form.rotary is not None:
        keys = form.rotary.rotate(keys, asked.positions - base)
    pools[0].flatten(0, 1)[tokens.slots] = keys
    if tokens.values is not None:
        pools[1].flatten(0, 1)[tokens.slots] = tokens.values
