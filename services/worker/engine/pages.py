"""Reference-counted pages and state slots. Pages of segments are shared by every prompt that uses them, never copied."""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence

from services.worker.errors import WorkerError

__all__ = ["NoRoomError", "PageAllocator", "PageHolds", "SlotAllocator", "pages_for"]


class NoRoomError(WorkerError):
    """A pool cannot give what was asked for now."""


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold a run of tokens."""
    return -(-num_tokens // page_size)


class PageAllocator:
    """Hands out page numbers, lowest first, so that a run of pages is contiguous whenever the pool allows it."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages))
        self._references: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take pages with one reference each.

        Raises:
            NoRoomError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise NoRoomError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        start = self._contiguous(count)
        pages = tuple(self._free[start : start + count])
        del self._free[start : start + count]
        self._references.update(dict.fromkeys(pages, 1))
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference to pages that somebody holds."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less; a page without any is free."""
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
                insort(self._free, page)

    def num_references(self, page: int) -> int:
        """How often a page must be released before it is free."""
        return self._references.get(page, 0)

    def check_integrity(self, holdings: Iterable[Sequence[int]]) -> None:
        """Every reference has a holder, and every page is either free or held.

        Raises:
            AssertionError: it does not add up.
        """
        counted: dict[int, int] = {}
        for pages in holdings:
            for page in pages:
                counted[page] = counted.get(page, 0) + 1
        if counted != self._references:
            raise AssertionError(f"pages held {counted} but referenced {self._references}")
        if sorted([*self._free, *self._references]) != list(range(self.num_pages)):
            raise AssertionError("pages are lost or free twice")

    def _contiguous(self, count: int) -> int:
        """Index in the free list of a contiguous run, else of the lowest pages."""
        free = self._free
        start = 0
        for index in range(1, len(free)):
            if index - start >= count:
                return start
            if free[index] != free[index - 1] + 1:
                start = index
        return start if len(free) - start >= count else 0


class PageHolds:
    """References to pages that states on their way hold, by number of the hold."""

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = pages
        self._held: dict[int, tuple[int, ...]] = {}
        self._next = 0

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._held.values())

    def retain(self, pages: tuple[int, ...]) -> int:
        """Hold pages that somebody holds already."""
        self._pages.retain(pages)
        return self._add(pages)

    def allocate(self, count: int) -> int:
        """Hold pages that nobody holds.

        Raises:
            NoRoomError: fewer are free.
        """
        return self._add(self._pages.allocate(count))

    def pages(self, hold: int) -> tuple[int, ...]:
        """What is held."""
        return self._held[hold]

    def release(self, hold: int) -> None:
        """Give the references back."""
        self._pages.release(self._held.pop(hold))

    def hand_over(self, hold: int) -> tuple[int, ...]:
        """The references become the caller's."""
        return self._held.pop(hold)

    def _add(self, pages: tuple[int, ...]) -> int:
        self._next += 1
        self._held[self._next] = pages
        return self._next


class SlotAllocator:
    """Hands out recurrent state slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    def allocate(self) -> int:
        """Take one.

        Raises:
            NoRoomError: none is free.
        """
        if not self._free:
            raise NoRoomError(f"all {self.num_slots} state slots are taken")
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give one back."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        self._free.append(slot)
