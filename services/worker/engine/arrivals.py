"""States on their way into the engine's memory, which prompts use layer by layer while they come."""

from collections.abc import Collection, Iterator

import torch

from services.worker.engine.context import EngineContext
from services.worker.engine.pages import NoRoomError
from services.worker.engine.states import SegmentState
from services.worker.engine.transfer import IncomingState

__all__ = ["Arrivals"]


class Arrivals:
    """By key. Lives on the engine's thread; only the layers of a state are written elsewhere."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._incoming: dict[bytes, IncomingState] = {}

    def __iter__(self) -> Iterator[IncomingState]:
        return iter(self._incoming.values())

    def find(self, key: bytes, token_ids: tuple[int, ...]) -> IncomingState | None:
        """The state that comes under a key, if it is of just these tokens."""
        incoming = self._incoming.get(key)
        return incoming if incoming is not None and incoming.token_ids == token_ids else None

    def is_taken(self, key: bytes) -> bool:
        """Whether a state comes under a key, of whatever tokens."""
        return key in self._incoming

    def begin(self, key: bytes, token_ids: tuple[int, ...], protected: Collection[bytes]) -> IncomingState:
        """Room for a state that is on its way from now on; `finish` or `fail` ends that.

        All that are on their way have no more planes than the store may have.

        Raises:
            NoRoomError: there is none.
            ValueError: the key is taken.
        """
        if key in self._incoming:
            raise ValueError("a state is on its way under this key already")
        try:
            incoming = IncomingState(self._context, token_ids, protected)
        except torch.OutOfMemoryError as error:
            raise NoRoomError(f"the device has no memory for a state's planes: {error}") from error
        held = sum(one.state.plane_bytes for one in (*self, incoming))
        if held > self._context.store.capacity_bytes:
            incoming.abandon()
            raise NoRoomError(f"{held} bytes of planes would be on their way")
        self._incoming[key] = incoming
        return incoming

    def finish(self, key: bytes, incoming: IncomingState) -> SegmentState | None:
        """All layers are there: keep the state, unless a capture was quicker or it finds no room. Prompts have it anyway."""
        if self._incoming.get(key) is incoming:
            del self._incoming[key]
        if key in self._context.store:
            incoming.abandon()
            return None
        try:
            incoming.finish(key)
        except NoRoomError:
            return None
        return incoming.state

    def fail(self, key: bytes, incoming: IncomingState) -> None:
        """The rest will not come; nothing writes into the room any more."""
        if self._incoming.get(key) is incoming:
            del self._incoming[key]
        incoming.abandon()
