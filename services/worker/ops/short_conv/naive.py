"""The short convolution token by token. Any float dtype."""

from collections.abc import Collection, Sequence

import torch

from services.worker.ops.layout import PartWalk
from services.worker.ops.short_conv.types import ConvResult

__all__ = ["step", "walk"]


def walk(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    parts: PartWalk,
    tails: torch.Tensor,
    body_tails: Sequence[torch.Tensor | None],
    keep_after: Collection[int] = (),
) -> ConvResult:
    """inputs `[N, C]`, weight `[C, K]`, tails `[B, K − 1, C]`; body_tails: the stored tail of every part with a body."""
    outputs = torch.empty_like(inputs)
    end_tails = tails.clone()
    kept: dict[int, torch.Tensor] = {}
    for request in range(len(parts.cu_parts) - 1):
        tail = tails[request]
        for part in parts.parts_of(request):
            for token in range(parts.cu_runs[part], parts.cu_runs[part + 1]):
                window = torch.cat([tail, inputs[token][None]])
                outputs[token] = torch.einsum("kc,ck->c", window, weight)
                tail = window[1:]
            stored = body_tails[part]
            if stored is not None:
                tail = stored
            if part in keep_after:
                kept[part] = tail.clone()
        end_tails[request] = tail
    return ConvResult(outputs, end_tails, kept)


def step(inputs: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """One token a request: inputs `[B, C]`; the tails `[slots, K − 1, C]` in slots `[B]` advance in place.

    Returns outputs `[B, C]`.
    """
    requests = inputs.shape[0]
    parts = PartWalk(tuple(range(requests + 1)), tuple(range(requests + 1)))
    result = walk(inputs, weight, parts, tails[slots], [None] * requests)
    tails[slots] = result.tails
    return result.outputs
