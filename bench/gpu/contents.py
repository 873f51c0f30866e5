"""Stored states with random numbers in them, for figures that depend on sizes alone: nothing has to be computed first."""

from collections.abc import Iterable

import torch

from services.worker.engine.context import EngineContext
from services.worker.engine.pages import pages_for
from services.worker.engine.states import PrefixState, SegmentState, page_rows
from services.worker.mixers.batch import LinearPlane, LinearSnapshot
from services.worker.mixers.shapes import StateShape

__all__ = ["RandomStates"]

# Small enough that states neither grow nor vanish on their way through many bodies.
_SCALE = 0.1


class RandomStates:
    """Puts states into an engine's store under keys; their pages are their own, their planes one of `num_planes` sets.

    Planes are shared, pages are not: what a context costs a decode step, or a prompt its walk, is as if each had its own.
    """

    def __init__(self, context: EngineContext, num_planes: int = 1) -> None:
        self._context = context
        shapes = list(context.model.spec.states)
        with torch.inference_mode():
            self._planes = [tuple(self._plane(shape) for shape in shapes) for _ in range(num_planes)]
            self._snapshots = tuple(LinearSnapshot(plane.end_state, plane.tail) for plane in self._planes[0])
        self._count = 0

    def put_segment(self, key: bytes, token_ids: tuple[int, ...]) -> None:
        """A segment's state.

        Raises:
            NoRoomError: pages are missing.
        """
        context = self._context
        seam = context.profile.seam_window.tokens(len(token_ids))
        pages = self._pages(len(token_ids) - seam)
        planes = self._planes[self._count % len(self._planes)]
        self._count += 1
        context.store.put(key, SegmentState(token_ids, seam, planes, pages))

    def put_prefix(self, key: bytes, token_ids: tuple[int, ...]) -> None:
        """The exact state behind a prompt's beginning.

        Raises:
            NoRoomError: pages are missing.
        """
        size = self._context.pages.page_size
        pages = self._pages(len(token_ids))
        rows = tuple(page_rows(pages, size, 0, 0, len(token_ids)))
        self._context.store.put(key, PrefixState(token_ids, self._snapshots, rows))

    def drop(self, keys: Iterable[bytes]) -> None:
        """Take states out of the store again."""
        for key in keys:
            self._context.store.drop(key)

    @torch.inference_mode()
    def _pages(self, num_tokens: int) -> tuple[int, ...]:
        """Pages of random keys and values."""
        context = self._context
        pages = context.pages.allocate(pages_for(num_tokens, context.pages.page_size))
        places = context.integers(pages)
        for pool in context.memory.page_pools:
            for tensor in (pool.keys,) if pool.latent else (pool.keys, pool.values):
                shape = (len(pages), *tensor.shape[1:])
                tensor[places] = torch.randn(shape, device=tensor.device, dtype=tensor.dtype)
        return pages

    def _plane(self, shape: StateShape) -> LinearPlane:
        device, dtype = self._context.device, self._context.memory.dtype
        state = (shape.num_heads, shape.key_dim, shape.value_dim)
        spread = 1.0 if shape.transition_shape[-1] == 1 else shape.key_dim**-0.5
        return LinearPlane(
            transition=torch.randn(shape.transition_shape, device=device).mul_(_SCALE * spread),
            end_state=torch.randn(state, device=device).mul_(_SCALE),
            tail=torch.randn(shape.conv_taps - 1, shape.conv_channels, device=device).to(dtype),
            decay=torch.full((shape.num_heads,), 0.5, device=device),
        )
