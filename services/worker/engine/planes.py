"""Memory for a segment's planes."""

import torch

from services.worker.engine.context import EngineContext
from services.worker.mixers.batch import LinearPlane
from services.worker.mixers.shapes import StateShape

__all__ = ["empty_planes"]


def empty_planes(context: EngineContext) -> list[LinearPlane]:
    """One a linear layer, with nothing in them yet."""
    return [_empty_plane(context, kept) for kept in context.model.spec.states]


def _empty_plane(context: EngineContext, kept: StateShape) -> LinearPlane:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=context.device)

    return LinearPlane(
        transition=empty(*kept.transition_shape),
        end_state=empty(kept.num_heads, kept.key_dim, kept.value_dim),
        tail=empty(kept.conv_taps - 1, kept.conv_channels, dtype=context.memory.dtype),
        decay=empty(kept.num_heads),
    )
