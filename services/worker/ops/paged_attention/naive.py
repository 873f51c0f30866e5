"""Paged attention, one query and one key at a time. Any float dtype."""

import torch

from services.worker.ops.paged_attention.types import AttentionShape, PagedQueries

__all__ = ["attend"]


def attend(
    queries: torch.Tensor,
    asked: PagedQueries,
    pools: tuple[torch.Tensor, torch.Tensor],
    shape: AttentionShape,
) -> torch.Tensor:
    """Attention of packed queries.

    queries `[N, Hq, D]` unrotated; asked: where they stand and what they may see; pools: keys and values
    `[pages, page_size, Hkv, D]`. Returns `[N, Hq, Dv]`. A query sees every key of its request at or before it.
    """
    keys, values = (pool.flatten(0, 1) for pool in pools)
    group = queries.shape[1] // keys.shape[1]
    outputs = torch.empty(*queries.shape[:2], values.shape[-1], dtype=queries.dtype, device=queries.device)
    for request, table in enumerate(asked.tables):
        for index in range(asked.cu_queries[request], asked.cu_queries[request + 1]):
            position = int(asked.positions[index])
            scores, seen = [], []
            for row in table.rows:
                query = queries[index]
                if shape.rotary is not None:
                    query = shape.rotary.rotate(query, asked.positions[index] - row.base)
                for slot in row.slots(table.page_size)[: max(0, position - row.first + 1)]:
                    key = keys[slot].repeat_interleave(group, dim=0)
                    scores.append((query * key).sum(-1) * shape.scale)
                    seen.append(values[slot].repeat_interleave(group, dim=0))
            weights = torch.stack(scores).softmax(dim=0)
            outputs[index] = (weights[..., None] * torch.stack(seen)).sum(0)
    return outputs
