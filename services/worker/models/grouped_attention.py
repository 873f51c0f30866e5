"""Grouped-query attention as checkpoints of several families name it (Llama's names)."""

from collections.abc import Callable

import torch

from services.worker.mixers.grouped_attention import (
    AttentionWeights,
    GroupedAttentionShape,
    create_grouped_attention,
)
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.models.weights import WeightReader

__all__ = ["read_grouped_attention"]


def read_grouped_attention(
    reader: WeightReader,
    name: str,
    shape: GroupedAttentionShape,
    hidden: int,
    read_norm: Callable[[str, int], torch.Tensor] | None = None,
) -> PagedAttention:
    """The layer under a name: `{q,k,v,o}_proj`, and `{q,k}_norm` as `read_norm` reads them, None where there are none.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape.
    """
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    own = reader.rows(keys, share=shape.key_share(reader.share))
    rows = {"q": reader.rows(2 * queries if shape.gated else queries), "k": own, "v": own}
    weights = AttentionWeights(
        in_proj=reader.stack({f"{name}.{part}_proj.weight": taken for part, taken in rows.items()}, hidden),
        out_proj=reader.read(f"{name}.o_proj.weight", hidden, queries, cut=reader.columns(queries)),
        q_norm=None if read_norm is None else read_norm(f"{name}.q_norm.weight", shape.head_dim),
        k_norm=None if read_norm is None else read_norm(f"{name}.k_norm.weight", shape.head_dim),
    )
    return create_grouped_attention(shape.split(reader.share), weights, reader.memory)
