"""Paged attention as matrix products over spans of pages: one rotation of the queries for every base in the table."""

from collections.abc import Sequence

import torch

from services.worker.ops.paged_attention.types import AttentionShape, BaseGroup, PagedQueries

__all__ = ["attend"]

# Scores of one block stay in cache, and keys behind its last query are never touched.
QUERY_BLOCK = 128


def attend(
    queries: torch.Tensor,
    asked: PagedQueries,
    pools: tuple[torch.Tensor, torch.Tensor],
    shape: AttentionShape,
) -> torch.Tensor:
    """As `naive.attend`; each request's positions must rise."""
    positions, cu_queries = asked.positions, asked.cu_queries
    keys, values = (pool.flatten(0, 1) for pool in pools)
    outputs = torch.empty(*queries.shape[:2], values.shape[-1], dtype=queries.dtype, device=queries.device)
    for request, table in enumerate(asked.tables):
        sources = [_Source(group, keys, values, queries.device) for group in table.groups()]
        for start in range(cu_queries[request], cu_queries[request + 1], QUERY_BLOCK):
            block = slice(start, min(start + QUERY_BLOCK, cu_queries[request + 1]))
            outputs[block] = _attend_block(queries[block], positions[block], sources, shape)
    return outputs


class _Source:
    """Keys and values of one base: views of the pool where one span holds them all.

    keys `[Hkv, S, D]`, values `[Hkv, S, Dv]`, at rising positions.
    """

    def __init__(self, group: BaseGroup, keys: torch.Tensor, values: torch.Tensor, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.base = group.base
        self.last = group.last_position
        self.keys = _gather(group, keys).transpose(0, 1)
        self.values = _gather(group, values).transpose(0, 1)

    def visible(self, last_position: int) -> int:
        """How many leading keys stand at or before a position."""
        if last_position >= self.last:
            return self.keys.shape[1]
        return sum(max(0, min(span.end, last_position + 1) - span.first) for span in self._group.spans)

    def hidden_from(self, positions: torch.Tensor, count: int) -> torch.Tensor:
        """Mask `[n, count]`: true where a key stands behind the query's position."""
        return self._group.positions(self._device)[:count] > positions[:, None]


def _gather(group: BaseGroup, pool: torch.Tensor) -> torch.Tensor:
    pieces = [pool[span.start : span.stop] for span in group.spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _attend_block(
    queries: torch.Tensor, positions: torch.Tensor, sources: Sequence[_Source], shape: AttentionShape
) -> torch.Tensor:
    """Queries `[n, Hq, D]` over all sources; scores `[Hkv, n, G, S]` with G query heads a key head."""
    first_query, last_query = int(positions[0]), int(positions[-1])
    seen = [(source, count) for source in sources if (count := source.visible(last_query))]
    kv_heads = seen[0][0].keys.shape[0]
    scores = []
    for source, count in seen:
        rotated = queries if shape.rotary is None else shape.rotary.rotate(queries, positions - source.base)
        heads = (rotated * shape.scale).unflatten(1, (kv_heads, -1)).permute(1, 0, 2, 3)
        score = torch.bmm(heads.flatten(1, 2), source.keys[:, :count].transpose(1, 2)).unflatten(1, heads.shape[1:3])
        if source.last > first_query:
            score.masked_fill_(source.hidden_from(positions, count)[None, :, None, :], float("-inf"))
        scores.append(score)
    weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(queries.dtype)
    mixed: torch.Tensor | None = None
    for (source, count), weight in zip(seen, weights.split([count for _, count in seen], dim=-1), strict=True):
        part = torch.bmm(weight.flatten(1, 2), source.values[:, :count])
        mixed = part if mixed is None else mixed.add_(part)
    if mixed is None:
        raise ValueError("a query sees no key")
    heads_first: torch.Tensor = mixed.unflatten(1, (queries.shape[0], -1))
    return heads_first.permute(1, 0, 2, 3).flatten(1, 2)
