"""Segment states on their way out of the engine's memory and into it.

The engine's thread only begins and ends a transfer: it takes references to pages and gives them back. Layers move on a thread
of the caller's, and on a GPU on a stream of their own (`side_stream.py`).
"""

from collections.abc import Collection, Mapping

import torch

from services.blob.encodings import StateEncoding, decode, decode_tail, encode, encode_tail
from services.worker.engine.context import EngineContext
from services.worker.engine.pages import NoRoomError, pages_for
from services.worker.engine.planes import empty_planes
from services.worker.engine.states import SegmentState, page_rows
from services.worker.mixers.batch import LinearPlane
from services.worker.mixers.shapes import StateShape

__all__ = ["IncomingState", "OutgoingState", "body_pages_of"]


class OutgoingState:
    """A state that stays readable while it is copied, whatever becomes of its entry. Made and closed on the engine's thread."""

    def __init__(self, context: EngineContext, state: SegmentState) -> None:
        self.state = state
        self._context = context
        self._slots = _body_slots(context, state.pages, state.body_tokens)
        self._hold = context.holds.retain(state.pages)
        context.copies.follow()

    @property
    def layers(self) -> tuple[str, ...]:
        """What every layer keeps, in order: `linear` or `attention`."""
        kept = self._context.model.spec.kept
        return tuple("linear" if isinstance(own, StateShape) else "attention" for own in kept)

    @torch.inference_mode()
    def read_layer(self, layer: int) -> dict[str, torch.Tensor]:
        """The planes of one layer in host memory, by name, as the profile encodes them. On any thread."""
        context = self._context
        index = _index_of_kind(context, layer)
        with context.copies.used():
            if isinstance(context.model.spec.kept[layer], StateShape):
                plane = self.state.planes[index]
                planes = encode(plane.transition, plane.end_state, plane.decay, context.profile.encoding)
                planes |= encode_tail(plane.tail, context.profile.encoding)
            else:
                planes = dict(context.memory.page_pools[index].planes(self._slots))
            return {name: tensor.cpu() for name, tensor in planes.items()}

    def follow(self) -> None:
        """On the engine's thread: what its passes have written so far may be read."""
        self._context.copies.follow()

    def close(self) -> None:
        """Give the pages back."""
        self._context.holds.release(self._hold)


class IncomingState:
    """Room for a segment state that comes from elsewhere. Made and ended, once, on the engine's thread.

    Stored states other than the protected ones make room for its pages. state: of which the first `layers_present` layers may be
    used, whoever holds on to its pages.

    Raises:
        NoRoomError: there are not enough.
    """

    def __init__(self, context: EngineContext, token_ids: tuple[int, ...], protected: Collection[bytes] = ()) -> None:
        self._context = context
        self.token_ids = token_ids
        self._seam_window = context.profile.seam_window.tokens(len(token_ids))
        # Made here, so that a state's memory is the engine's own, wherever it came from.
        self._planes = empty_planes(context)
        self.num_layers = len(context.model.spec.kept)
        self.layers_present = 0
        body = len(token_ids) - self._seam_window
        count = body_pages_of(context, token_ids)
        context.store.make_room(count, protected)
        self._hold = context.holds.allocate(count)
        pages = context.holds.pages(self._hold)
        self._slots = _body_slots(context, pages, body)
        self.state = SegmentState(token_ids, self._seam_window, tuple(self._planes), pages)
        # Earlier passes may still read the pages: what is written now must come behind them.
        context.copies.follow()

    @property
    def is_present(self) -> bool:
        """Every layer has come."""
        return self.layers_present == self.num_layers

    @torch.inference_mode()
    def write_layer(self, layer: int, planes: Mapping[str, torch.Tensor]) -> None:
        """Take one layer's planes, as `read_layer` gave them; layers come in order. On any thread, one at a time.

        Raises:
            ValueError: a plane is missing or of another shape, or a layer is left out; the message names it.
        """
        if layer != self.layers_present:
            raise ValueError(f"layer {layer} comes in place of layer {self.layers_present}")
        context = self._context
        index, kept = _index_of_kind(context, layer), context.model.spec.kept[layer]
        with context.copies.used():
            moved = {name: own.to(context.device, non_blocking=True) for name, own in planes.items()}
            if isinstance(kept, StateShape):
                _fill_plane(self._planes[index], moved, context.profile.encoding)
            else:
                context.memory.page_pools[index].write(self._slots, moved)
        self.layers_present = layer + 1

    def finish(self, key: bytes) -> None:
        """Put the state into the store; where that fails, the room is given back.

        Raises:
            NoRoomError: its planes do not fit.
            ValueError: a layer is missing, or the key is taken.
        """
        context = self._context
        context.copies.lead()
        try:
            if not self.is_present:
                raise ValueError(f"{self.layers_present} layers have come of {self.num_layers}")
            context.store.put(key, self.state)
        except (NoRoomError, ValueError):
            context.holds.release(self._hold)
            raise
        context.holds.hand_over(self._hold)

    def abandon(self) -> None:
        """Give the room back."""
        self._context.copies.lead()
        self._context.holds.release(self._hold)


def body_pages_of(context: EngineContext, token_ids: tuple[int, ...]) -> int:
    """Pages of a segment's state."""
    body = len(token_ids) - context.profile.seam_window.tokens(len(token_ids))
    return pages_for(body, context.pages.page_size)


def _index_of_kind(context: EngineContext, layer: int) -> int:
    """Which of the linear, or of the attention layers, a layer is."""
    kinds = [isinstance(kept, StateShape) for kept in context.model.spec.kept]
    return kinds[:layer].count(kinds[layer])


def _body_slots(context: EngineContext, pages: tuple[int, ...], body_tokens: int) -> torch.Tensor:
    size = context.pages.page_size
    return context.integers([slot for row in page_rows(pages, size, 0, 0, body_tokens) for slot in row.slots(size)])


def _fill_plane(plane: LinearPlane, planes: Mapping[str, torch.Tensor], encoding: StateEncoding) -> None:
    try:
        transition, end_state = decode(planes, encoding)
        found = (transition, end_state, decode_tail(planes, encoding, plane.tail.dtype), planes["decay"])
    except (KeyError, RuntimeError, IndexError) as error:
        raise ValueError(f"planes are missing or of another shape: {error}") from error
    for own, read in zip(plane.tensors, found, strict=True):
        if own.shape != read.shape or own.dtype != read.dtype:
            raise ValueError(f"planes give {tuple(read.shape)} of {read.dtype}, not {tuple(own.shape)} of {own.dtype}")
        own.copy_(read)
