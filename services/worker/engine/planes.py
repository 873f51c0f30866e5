"""Memory for a segment's planes."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod

import torch

from services.worker.engine.context import EngineContext
from services.worker.mixers.batch import LinearPlane
from services.worker.mixers.shapes import StateShape
from services.worker.ops.layout import BODY_ALIGNMENT

__all__ = ["empty_planes"]


def empty_planes(context: EngineContext) -> list[LinearPlane]:
    """One a linear layer, with nothing in them yet: those of layers alike side by side, each where wide loads want it."""
    alike = ((shape, len(list(layers))) for shape, layers in groupby(context.model.spec.states))
    return [plane for shape, count in alike for plane in _of_layers(context, shape, count)]


def _of_layers(context: EngineContext, kept: StateShape, count: int) -> Iterator[LinearPlane]:
    def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Sequence[torch.Tensor]:
        size, step = prod(shape), BODY_ALIGNMENT // dtype.itemsize
        room = torch.empty(count, -(-size // step) * step, dtype=dtype, device=context.device)
        return [own[:size].view(*shape) for own in room.unbind()]

    planes = zip(
        empty(kept.transition_shape),
        empty((kept.num_heads, kept.key_dim, kept.value_dim)),
        empty((kept.conv_taps - 1, kept.conv_channels), context.memory.dtype),
        empty((kept.num_heads,)),
        strict=True,
    )
    return (LinearPlane(*tensors) for tensors in planes)
