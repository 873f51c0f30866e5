"""Paged attention of several requests as one padded product: the form of accelerators that have no paged kernel.

Keys are gathered and turned by their row's base in fp32, so that one rotation of the queries serves all of them; the
pages stay as they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from services.worker.ops.paged_attention.types import AttentionShape, PagedQueries, PageTable

__all__ = ["attend"]

# Scores of one tile of requests, counted in query-key pairs of all heads, stay under this number.
TILE_SCORES = 1 << 28
# Behind every key and every query.
_NOWHERE = 1 << 40

_Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where one request's keys lie: flat slots, true positions and bases, `[S]` each."""

    slots: _Integers
    positions: _Integers
    bases: _Integers


def attend(
    queries: torch.Tensor,
    asked: PagedQueries,
    pools: tuple[torch.Tensor, torch.Tensor],
    shape: AttentionShape,
) -> torch.Tensor:
    """As `naive.attend`."""
    positions, cu_queries = asked.positions, asked.cu_queries
    keys, values = (pool.flatten(0, 1) for pool in pools)
    outputs = torch.empty(*queries.shape[:2], values.shape[-1], dtype=queries.dtype, device=queries.device)
    rotated = queries.float() if shape.rotary is None else shape.rotary.rotate(queries.float(), positions)
    sources = [_locate(table) for table in asked.tables]
    for tile in _tiles(cu_queries, sources, queries.shape[1]):
        rows = _pad([np.arange(cu_queries[request], cu_queries[request + 1]) for request in tile], fill=-1)
        query_rows = torch.from_numpy(rows).to(queries.device)
        present = query_rows >= 0
        places = torch.where(present, positions[query_rows], _NOWHERE)
        mixed = _attend_tile(rotated[query_rows], places, [sources[request] for request in tile], (keys, values), shape)
        outputs[query_rows[present]] = mixed[present].to(outputs.dtype)
    return outputs


def _locate(table: PageTable) -> _Keys:
    spans = [(group.base, span) for group in table.groups() for span in group.spans]
    return _Keys(
        np.concatenate([np.arange(span.start, span.stop) for _, span in spans]),
        np.concatenate([np.arange(span.first, span.end) for _, span in spans]),
        np.concatenate([np.full(span.stop - span.start, base) for base, span in spans]),
    )


def _tiles(cu_queries: Sequence[int], sources: Sequence[_Keys], heads: int) -> Iterator[list[int]]:
    """Requests of similar size together, as many as the bound allows."""
    lengths = [cu_queries[request + 1] - cu_queries[request] for request in range(len(sources))]
    order = sorted((request for request in range(len(sources)) if lengths[request]), key=lambda own: lengths[own])
    tile: list[int] = []
    longest = 0
    for request in order:
        longest = max(longest, len(sources[request].slots))
        if tile and (len(tile) + 1) * lengths[request] * longest * heads > TILE_SCORES:
            yield tile
            tile, longest = [], len(sources[request].slots)
        tile.append(request)
    if tile:
        yield tile


def _pad(rows: Sequence[_Integers], fill: int) -> _Integers:
    padded = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _attend_tile(
    queries: torch.Tensor,
    places: torch.Tensor,
    sources: Sequence[_Keys],
    flat_pools: tuple[torch.Tensor, torch.Tensor],
    shape: AttentionShape,
) -> torch.Tensor:
    """Rotated queries `[B, Q, Hq, D]` at true places `[B, Q]` over each request's keys; returns `[B, Q, Hq, Dv]`."""
    device = queries.device
    slots = _pad([source.slots for source in sources], fill=-1)
    # Padding reads a slot that holds numbers: an unwritten one may hold NaN, which a zero weight does not remove.
    slots = np.where(slots >= 0, slots, slots[:, :1])
    slot_index = torch.from_numpy(slots).to(device)
    key_places = torch.from_numpy(_pad([source.positions for source in sources], fill=2 * _NOWHERE)).to(device)
    # A slot behind every query may be unwritten; what it holds must not reach a product.
    last_place = places.masked_fill(places == _NOWHERE, -1).amax(1, keepdim=True)
    unseen = (key_places > last_place)[:, :, None, None]
    keys, values = (pool[slot_index].float().masked_fill(unseen, 0.0) for pool in flat_pools)
    if shape.rotary is not None:
        bases = torch.from_numpy(_pad([source.bases for source in sources], fill=0)).to(device)
        keys = shape.rotary.rotate(keys, bases)
    visible = key_places[:, None, None, :] <= places[:, None, :, None]
    group = queries.shape[2] // keys.shape[2]
    mixed = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.repeat_interleave(group, dim=2).transpose(1, 2),
        values.repeat_interleave(group, dim=2).transpose(1, 2),
        attn_mask=visible,
        scale=shape.scale,
    )
    return mixed.transpose(1, 2)
