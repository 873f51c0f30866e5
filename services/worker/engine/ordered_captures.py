"""The captures that one request has ordered: chunks that run ahead of its combine, and the last one, which shares its sweep."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.worker.engine.capture import CapturePass, end_capture, store_state
from services.worker.engine.capture_rows import CaptureProgress
from services.worker.engine.context import EngineContext
from services.worker.engine.pages import NoRoomError
from services.worker.engine.requests import CaptureEvent, CaptureSegment
from services.worker.engine.states import PrefixState, SegmentState
from services.worker.engine.sweep import Rows

__all__ = ["OrderedCaptures"]


@dataclass(slots=True)
class _Pack:
    """Segments that run through the layers together. began_at: when their first chunk was taken."""

    segments: Sequence[CaptureSegment]
    capture: CapturePass
    began_at: float | None = None

    def seconds(self) -> float:
        """From the first layer until now."""
        return 0.0 if self.began_at is None else time.monotonic() - self.began_at


class OrderedCaptures:
    """Segments in order, packed up to `pack_tokens`. Creating it reserves their pages.

    states: by key, for the request's combine; a layer's planes are there behind the mixer of the last chunk. `sink` gets one
    event a segment.

    Raises:
        NoRoomError: pages are missing; nothing is taken.
    """

    def __init__(
        self,
        context: EngineContext,
        segments: Sequence[CaptureSegment],
        prime: PrefixState | None,
        pack_tokens: int,
        sink: Callable[[CaptureEvent], None],
    ) -> None:
        self._context = context
        self._sink = sink
        self._packs: deque[_Pack] = deque()
        self.states: dict[bytes, SegmentState] = {}
        try:
            for pack in _packed(segments, pack_tokens):
                capture = CapturePass(context, [segment.token_ids for segment in pack], prime)
                self._packs.append(_Pack(pack, capture))
                self.states.update(zip((segment.key for segment in pack), capture.states, strict=True))
        except NoRoomError:
            self.abandon()
            raise

    @property
    def keys(self) -> set[bytes]:
        """Segments that are not captured yet."""
        return {segment.key for pack in self._packs for segment in pack.segments}

    def find(self, key: bytes) -> CaptureProgress | None:
        """The capture of a segment that is not captured yet."""
        for pack in self._packs:
            keys = [segment.key for segment in pack.segments]
            if key in keys:
                return pack.capture.watch(keys.index(key))
        return None

    @property
    def runs_ahead(self) -> bool:
        """More than one chunk is left: the next one does not share the combine's sweep."""
        return sum(pack.capture.chunks_left for pack in self._packs) > 1

    @property
    def next_tokens(self) -> int:
        """Tokens of the next chunk."""
        return self._packs[0].capture.next_tokens if self._packs else 0

    @property
    def held_pages(self) -> tuple[int, ...]:
        """Pages of what is not captured yet."""
        return tuple(page for pack in self._packs for page in pack.capture.held_pages)

    def take_chunk(self) -> Sequence[Rows]:
        """The next chunk, for one sweep; no rows where nothing is left."""
        if not self._packs:
            return ()
        pack = self._packs[0]
        if pack.began_at is None:
            pack.began_at = time.monotonic()
        return pack.capture.take_chunk()

    def finish_chunk(self) -> None:
        """Behind the last layer: what is complete is stored, and its sink is told."""
        if not self._packs or not self._packs[0].capture.is_complete:
            return
        pack = self._packs[0]
        states = pack.capture.finish()
        self._packs.popleft()
        for segment, state in zip(pack.segments, states, strict=True):
            reason = store_state(self._context, segment.key, state)
            self._sink(end_capture(self._context, segment.key, pack.seconds(), reason))

    def fail(self, reason: str) -> None:
        """Give up what is left, and say so."""
        keys = [segment.key for pack in self._packs for segment in pack.segments]
        self.abandon()
        for key in keys:
            self._sink(CaptureEvent(key, 0, 0.0, reason))

    def abandon(self) -> None:
        """Give back every page of what is left; no event follows."""
        for pack in self._packs:
            pack.capture.abandon()
        self._packs.clear()


def _packed(segments: Sequence[CaptureSegment], pack_tokens: int) -> list[list[CaptureSegment]]:
    """Neighbours together up to so many tokens, at least one a pack."""
    packs: list[list[CaptureSegment]] = []
    room = 0
    for segment in segments:
        length = len(segment.token_ids)
        if not packs or length > room:
            packs.append([])
            room = pack_tokens
        packs[-1].append(segment)
        room -= length
    return packs
