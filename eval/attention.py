"""How much of a question's attention falls on each token of its prompt."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from services.worker.mixers.batch import CombineBatch
from services.worker.mixers.gated_attention import FullAttention
from services.worker.ops.norm import rms_norm
from services.worker.ops.paged_attention import PageTable

__all__ = ["question_attention"]


def question_attention(
    mixer: FullAttention, normed: torch.Tensor, batch: CombineBatch, question_tokens: Sequence[int]
) -> list[torch.Tensor]:
    """For each prompt: attention `[positions]` of its last `question_tokens` tokens, summed over them, the mean of heads.

    normed `[N, hidden]`: the layer's input of all live tokens; the keys of the pass are written already.
    """
    masses = []
    for request, count in enumerate(question_tokens):
        end = batch.cu_queries[request + 1]
        rows = slice(end - count, end)
        masses.append(_mass(mixer, normed[rows], batch.positions[rows], batch.tables[request]))
    return masses


def _queries(mixer: FullAttention, normed: torch.Tensor) -> torch.Tensor:
    """Normed queries `[n, Hq, D]`, not rotated."""
    shape = mixer.shape
    width = shape.num_heads * shape.head_dim * (2 if shape.gated else 1)
    heads = F.linear(normed, mixer.weights.in_proj[:width]).unflatten(-1, (shape.num_heads, -1))[..., : shape.head_dim]
    return heads if mixer.weights.q_norm is None else rms_norm(heads, mixer.weights.q_norm, shape.eps)


def _mass(mixer: FullAttention, normed: torch.Tensor, positions: torch.Tensor, table: PageTable) -> torch.Tensor:
    queries = _queries(mixer, normed)
    groups = table.groups()
    slots = torch.cat([torch.arange(span.start, span.stop) for group in groups for span in group.spans])
    places = torch.cat([group.positions(queries.device) for group in groups])
    bases = torch.cat([torch.full((sum(s.stop - s.start for s in group.spans),), group.base) for group in groups])
    keys = mixer.pool.keys.flatten(0, 1)[slots.to(queries.device)]
    if mixer.rotary is not None:
        queries = mixer.rotary.rotate(queries, positions)
        keys = mixer.rotary.rotate(keys, bases.to(queries.device))
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * mixer.shape.head_dim**-0.5
    scores = scores.masked_fill(places > positions[:, None], float("-inf"))
    weights = scores.softmax(-1).sum(1).mean(0)
    return torch.zeros(int(positions[-1]) + 1, device=weights.device).index_add_(0, places, weights)
