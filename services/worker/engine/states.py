"""Stored states: segment states and prefix snapshots, and the worker's store of them."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from services.worker.engine.pages import NoRoomError, PageAllocator, pages_for
from services.worker.mixers.batch import LinearPlane, LinearSnapshot
from services.worker.ops.paged_attention import PageRow, PageRun

__all__ = ["PrefixState", "SegmentState", "StateStore", "StoreEviction", "StoredState", "page_rows"]


def page_rows(pages: Sequence[int], page_size: int, base: int, first: int, num_tokens: int) -> list[PageRow]:
    """Rows of a run of tokens that fills pages from the start of the first one."""
    return [
        PageRow(page, base, first + offset, min(page_size, num_tokens - offset))
        for page, offset in zip(pages, range(0, num_tokens, page_size), strict=False)
    ]


def _nowhere() -> NDArray[np.int64]:
    return np.empty((0, 3), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SegmentState:
    """One segment under one profile; immutable once it is captured.

    planes: one a linear layer, maybe fewer while the capture is on its way through the layers; pages: keys and values of the
    body's tokens in every attention layer.
    """

    token_ids: tuple[int, ...]
    seam_window: int
    planes: Sequence[LinearPlane]
    pages: tuple[int, ...]
    _addresses: NDArray[np.int64] = field(default_factory=_nowhere, init=False, compare=False, repr=False)

    @property
    def addresses(self) -> NDArray[np.int64]:
        """Where the transition, end state and tail of every plane that is there lie, `[layers, 3]`, for kernels."""
        if len(self._addresses) != len(self.planes):
            held = [(plane.transition, plane.end_state, plane.tail) for plane in self.planes]
            found = np.array([[tensor.data_ptr() for tensor in own] for own in held], dtype=np.int64).reshape(-1, 3)
            object.__setattr__(self, "_addresses", found)
        return self._addresses

    @property
    def body_tokens(self) -> int:
        """Tokens after the seam window."""
        return len(self.token_ids) - self.seam_window

    @property
    def plane_bytes(self) -> int:
        """Bytes outside the page pool."""
        return sum(tensor.nbytes for plane in self.planes for tensor in plane.tensors)

    def rows(self, start: int) -> PageRun:
        """The body's page-table rows when the segment begins at true position `start`."""
        return PageRun(self.pages, start, start + self.seam_window, self.body_tokens)

    def rows_of(self, start: int, places: range, page_size: int) -> Iterator[PageRow | PageRun]:
        """Those of some places of the body alone: the rest of the page in which they begin, then whole pages."""
        begin, stop = places.start - self.seam_window, places.stop - self.seam_window
        offset = begin % page_size
        if offset and begin < stop:
            count = min(page_size - offset, stop - begin)
            yield PageRow(self.pages[begin // page_size], start, start + places.start, count, offset)
            begin += count
        if begin < stop:
            pages = self.pages[begin // page_size : pages_for(stop, page_size)]
            yield PageRun(pages, start, start + self.seam_window + begin, stop - begin)


@dataclass(frozen=True, slots=True)
class PrefixState:
    """The exact state after the first tokens of a prompt; immutable. snapshots: one a linear layer."""

    token_ids: tuple[int, ...]
    snapshots: tuple[LinearSnapshot, ...]
    rows: tuple[PageRow | PageRun, ...]

    @property
    def pages(self) -> tuple[int, ...]:
        """Every page that the rows name, once."""
        return tuple(dict.fromkeys(page for row in self.rows for page in row.pages))

    @property
    def plane_bytes(self) -> int:
        """Bytes outside the page pool."""
        return sum(snapshot.state.nbytes + snapshot.tail.nbytes for snapshot in self.snapshots)


StoredState = SegmentState | PrefixState


class StoreEviction(StrEnum):
    """What the store evicts for by itself."""

    PAGES = "pages"
    PLANES = "planes"


class StateStore:
    """States by key, the least recently used first. Holds one reference to the pages of each; users hold their own.

    The directory decides what is worth keeping. Only where memory runs out before its word comes does the store evict by
    itself, so that stored states never keep a prompt waiting; `evictions` counts those.
    """

    def __init__(self, pages: PageAllocator, capacity_bytes: int, page_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.evictions = dict.fromkeys(StoreEviction, 0)
        self._pages = pages
        self._page_bytes = page_bytes
        self._states: dict[bytes, StoredState] = {}
        self._plane_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._states

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[StoredState]:
        return iter(self._states.values())

    @property
    def used_bytes(self) -> int:
        """Everything held: planes, and whole pages (a page of two states counts for both)."""
        return self._plane_bytes + sum(len(state.pages) for state in self) * self._page_bytes

    def size_bytes(self, state: StoredState) -> int:
        """What a state takes, pages whole."""
        return state.plane_bytes + len(state.pages) * self._page_bytes

    def put(self, key: bytes, state: StoredState) -> None:
        """Store a state under a key that is not taken; its page references become the store's. Evicts for its planes.

        Raises:
            NoRoomError: the planes do not fit into an empty store; nothing changes.
            ValueError: the key is taken: entries are written once.
        """
        if key in self._states:
            raise ValueError("a state is stored under this key already")
        if state.plane_bytes > self.capacity_bytes:
            raise NoRoomError(f"a state of {state.plane_bytes} bytes is larger than the store of {self.capacity_bytes}")
        while self._plane_bytes + state.plane_bytes > self.capacity_bytes:
            self._evict(next(iter(self._states)), StoreEviction.PLANES)
        self._states[key] = state
        self._plane_bytes += state.plane_bytes

    def rename(self, key: bytes, new_key: bytes) -> int:
        """Put a state under another key; returns its size, 0 where it is not there.

        Raises:
            ValueError: the new key is taken.
        """
        if new_key in self._states:
            raise ValueError("a state is stored under this key already")
        state = self._states.pop(key, None)
        if state is None:
            return 0
        self._states[new_key] = state
        return self.size_bytes(state)

    def get_segment(self, key: bytes, token_ids: Sequence[int]) -> SegmentState | None:
        """The segment state under a key, if it was computed from just these tokens."""
        state = self._use(key)
        if isinstance(state, SegmentState) and state.token_ids == tuple(token_ids):
            return state
        return None

    def get_prefix(self, key: bytes, token_ids: Sequence[int]) -> PrefixState | None:
        """The snapshot under a key, if it was computed from just these tokens."""
        state = self._use(key)
        if isinstance(state, PrefixState) and state.token_ids == tuple(token_ids):
            return state
        return None

    def get(self, key: bytes) -> StoredState | None:
        """Whatever is stored under a key."""
        return self._states.get(key)

    def make_room(self, num_pages: int, protected: Collection[bytes] = ()) -> bool:
        """Evict states until so many pages are free; evicts nothing when that cannot be reached. Returns whether it was.

        A page is freed with the last state that holds it (snapshots of one conversation share theirs), and not at all
        while a running prompt shares it; states whose eviction frees nothing stay, and so do `protected` keys.
        """
        missing = num_pages - self._pages.num_free
        victims: list[bytes] = []
        given_up: Counter[int] = Counter()
        freed: set[int] = set()
        for key, state in self._states.items():
            if len(freed) >= missing:
                break
            if key not in protected:
                victims.append(key)
                given_up.update(state.pages)
                freed.update(page for page in state.pages if given_up[page] == self._pages.num_references(page))
        if len(freed) < missing:
            return False
        for key in victims:
            if not freed.isdisjoint(self._states[key].pages):
                self._evict(key, StoreEviction.PAGES)
        return True

    def drop(self, key: bytes) -> bool:
        """Forget a state; its memory goes with the last reference. Returns whether it was there."""
        state = self._states.pop(key, None)
        if state is None:
            return False
        self._plane_bytes -= state.plane_bytes
        self._pages.release(state.pages)
        return True

    def _evict(self, key: bytes, reason: StoreEviction) -> None:
        self.evictions[reason] += 1
        self.drop(key)

    def _use(self, key: bytes) -> StoredState | None:
        state = self._states.pop(key, None)
        if state is not None:
            self._states[key] = state
        return state

    def check_integrity(self) -> None:
        """The byte count is the sum of the states.

        Raises:
            AssertionError: it is not.
        """
        held = sum(state.plane_bytes for state in self)
        if held != self._plane_bytes:
            raise AssertionError(f"{held} bytes of planes are held, {self._plane_bytes} are counted")
