"""How much of a question's attention falls on each token of its prompt."""

from collections.abc import Sequence

import torch

from services.worker.mixers.batch import CombineBatch
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.ops.paged_attention import PageTable

__all__ = ["question_attention"]

# Queries whose weights over all keys are in memory at once.
_QUERIES = 16


def question_attention(
    mixer: PagedAttention, normed: torch.Tensor, batch: CombineBatch, question_tokens: Sequence[int]
) -> list[torch.Tensor]:
    """For each prompt: attention `[positions]` of its last `question_tokens` tokens, summed over them, the mean of heads.

    normed `[N, hidden]`: the layer's input of all live tokens; the keys of the pass are written already. fp32.
    """
    masses = []
    for request, count in enumerate(question_tokens):
        end = batch.queries.cu_queries[request + 1]
        rows = slice(end - count, end)
        masses.append(_mass(mixer, normed[rows], batch.queries.positions[rows], batch.queries.tables[request]))
    return masses


def _mass(mixer: PagedAttention, normed: torch.Tensor, positions: torch.Tensor, table: PageTable) -> torch.Tensor:
    queries, device = mixer.projection.project(normed).stored_q, normed.device
    groups = table.groups()
    slots = torch.cat([torch.arange(span.start, span.stop) for group in groups for span in group.spans])
    places = torch.cat([group.positions(device) for group in groups])
    bases = torch.cat([torch.full((sum(s.stop - s.start for s in group.spans),), group.base) for group in groups])
    keys = mixer.pool.keys.flatten(0, 1)[slots.to(device)]
    if mixer.rotary is not None:
        queries = mixer.rotary.rotate(queries, positions)
        keys = mixer.rotary.rotate(keys, bases.to(device))
    keys = keys.float().repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    total = torch.zeros(len(places), device=device)
    for own, asked in zip(queries.float().split(_QUERIES), positions.split(_QUERIES), strict=True):
        scores = torch.einsum("qhd,khd->hqk", own, keys) * mixer.projection.scale
        scores = scores.masked_fill(places > asked[:, None], float("-inf"))
        total += scores.softmax(-1).sum(1).mean(0)
    mass = torch.zeros(int(places.max()) + 1, device=device)
    return mass.index_add_(0, places, total)
