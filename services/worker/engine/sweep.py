"""A sweep over the layers: rows of several passes side by side, so that the weights are read once for all of them."""

from collections.abc import Generator, Sequence
from typing import Protocol

import torch

from services.worker.engine.context import EngineContext
from services.worker.mixers.batch import Mixer
from services.worker.models.decoder import Layer

__all__ = ["ALL_LAYERS", "Rows", "Sweep", "run_layer"]

# More than any model has.
ALL_LAYERS = 1 << 30


class Rows(Protocol):
    """Tokens of one pass on their way through the layers. hidden `[N, hidden]`: their states behind the last layer."""

    hidden: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """N."""
        ...

    @property
    def num_layers(self) -> int:
        """How many layers they are to run through; rows of one sweep have the same number."""
        ...

    def start(self) -> None:
        """Embed the tokens, and set up what the mixers read and write."""
        ...

    def mix(self, mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
        """The pass's own part of a layer: normed hidden states `[N, hidden]` to `[N, hidden]`."""
        ...


def run_layer(layer: Layer, joined: Sequence[Rows]) -> None:
    """One layer: norms, feed-forward block and residual once over all rows, in the mixer each pass on its own."""
    sizes = [rows.num_tokens for rows in joined]

    def mix(mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
        own = zip(joined, normed.split(sizes), strict=True)
        return _join([rows.mix(mixer, hidden) for rows, hidden in own])

    hidden = layer.run(_join([rows.hidden for rows in joined]), mix)
    for rows, own in zip(joined, hidden.split(sizes), strict=True):
        rows.hidden = own


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Sweep:
    """One way through the layers.

    On the CPU all rows go through matrix products of their own, whose rounding then cannot depend on what else runs; a GPU
    runs them at once.
    """

    def __init__(self, context: EngineContext, rows: Sequence[Rows]) -> None:
        self._context = context
        self._rows = list(rows)

    @property
    def num_tokens(self) -> int:
        """Rows of all passes."""
        return sum(rows.num_tokens for rows in self._rows)

    def run(self) -> Generator[None, None, None]:
        """Yields after every layer."""
        for rows in self._rows:
            rows.start()
        depth = min((rows.num_layers for rows in self._rows), default=ALL_LAYERS)
        for layer in self._context.model.layers[:depth]:
            for joined in self._products():
                run_layer(layer, joined)
            yield

    def drop(self, dropped: Sequence[Rows]) -> None:
        """Go on without some rows, whose pages and slots nothing writes from now on."""
        self._rows = [rows for rows in self._rows if rows not in dropped]

    def _products(self) -> list[list[Rows]]:
        return [[rows] for rows in self._rows] if self._context.device.type == "cpu" else [self._rows]
