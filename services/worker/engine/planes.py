"""A segment state as named planes of bytes, layer by layer: what leaves the worker, and what tests compare bit by bit."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from services.worker.engine.context import EngineContext
from services.worker.engine.states import SegmentState, page_rows
from services.worker.mixers.shapes import StateShape

__all__ = ["Plane", "layer_planes"]


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of one layer."""

    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def layer_planes(context: EngineContext, state: SegmentState) -> Iterator[list[Plane]]:
    """The planes of every layer of the model, in order; pages' planes of body tokens without the pages' padding."""
    linear, attention = 0, 0
    for layer, kept in enumerate(context.model.spec.kept):
        if isinstance(kept, StateShape):
            plane = state.planes[linear]
            linear += 1
            yield [
                _plane(layer, "transition", plane.transition),
                _plane(layer, "end_state", plane.end_state),
                _plane(layer, "conv_tail", plane.tail),
                _plane(layer, "decay", plane.decay),
            ]
        else:
            pool = context.memory.page_pools[attention]
            attention += 1
            slots = _body_slots(context, state)
            yield [_plane(layer, name, tensor) for name, tensor in pool.planes(slots).items()]


def _body_slots(context: EngineContext, state: SegmentState) -> torch.Tensor:
    size = context.pages.page_size
    rows = page_rows(state.pages, size, 0, 0, state.body_tokens)
    return context.integers([slot for row in rows for slot in row.slots(size)])


def _plane(layer: int, name: str, tensor: torch.Tensor) -> Plane:
    data = tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return Plane(layer, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
