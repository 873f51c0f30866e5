"""Pieces of public models that several families share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.exactness.reference_model import ReferenceAttention, ReferenceLayer, ReferenceLinear

__all__ = ["PreNormLayer", "TakenApart", "heads"]


def heads(flat: torch.Tensor, count: int) -> torch.Tensor:
    """`[N, count · D]` to `[N, count, D]`."""
    split: torch.Tensor = flat.unflatten(-1, (count, -1))
    return split


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """The frame `x + mixer(norm x)`, `x + feed_forward(norm x)` of public modules."""

    mixer: ReferenceLinear | ReferenceAttention
    input_norm: Callable[[torch.Tensor], torch.Tensor]
    post_norm: Callable[[torch.Tensor], torch.Tensor]
    feed_forward: Callable[[torch.Tensor], torch.Tensor]

    def run(self, hidden: torch.Tensor, mix: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        hidden = hidden + mix(self.input_norm(hidden))
        # Public expert blocks take a batch of sequences.
        return hidden + self.feed_forward(self.post_norm(hidden)[None])[0]


@dataclass(frozen=True, slots=True)
class TakenApart:
    """A public model of the usual frame: `model.{embed_tokens,norm}` and `lm_head`."""

    public: Any
    layers: Sequence[ReferenceLayer]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.public.model.embed_tokens(token_ids)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.public.lm_head(self.public.model.norm(hidden))
        return logits
