"""Cosines and sines of places, worked out once a pass for all layers whose rotary is alike."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.worker.ops.paged_attention.types import PagedQueries
from services.worker.ops.rotary import Rotary

__all__ = ["Turns"]


@dataclass(frozen=True, slots=True)
class Turns:
    """cos, sin `[n, D_rot / 2]` in fp32 of angles in fp64; one number that nobody reads where there is no rotary."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of_queries(cls, asked: PagedQueries, rotary: Rotary | None, base: int = 0) -> "Turns":
        """Of the distance of every query's position to a base."""
        return cls.once(asked, rotary, f"queries from {base}", lambda: asked.positions - base)

    @classmethod
    def once(cls, asked: PagedQueries, rotary: Rotary | None, key: str, places: Callable[[], torch.Tensor]) -> "Turns":
        """Of places `[n]` that a key names within a pass."""
        label = None if rotary is None else rotary.label
        return asked.prepare(f"turns {label} {key}", lambda: _turn(rotary, places()))


def _turn(rotary: Rotary | None, places: torch.Tensor) -> Turns:
    if rotary is None:
        unread = torch.zeros(1, device=places.device)
        return Turns(unread, unread)
    angles = places.double()[:, None] * rotary.frequencies.double()
    return Turns(angles.cos().float(), angles.sin().float())
