"""A line in which no tenant's requests hold up another's: start-time fair queueing (Goyal, Vin and Cheng, 1996).

Every request has a start tag: where its tenant's one before ends, but not before the tag of what has left the line last. Ends
lie behind starts by the work that a request brings. Whoever has the least tag is next, so that a tenant with one request meets
at most one of each other's, however many these have sent. Tags depend on arrivals alone, on no clock: ranks of a group agree.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

from services.worker.engine.requests import GenerateRequest

__all__ = ["FairLine"]


class _Requesting(Protocol):
    @property
    def request(self) -> GenerateRequest: ...


# Ends that are known; those behind which the line is already say nothing.
_MOST_ENDS = 4096

_Item = TypeVar("_Item", bound=_Requesting)


@dataclass(frozen=True, slots=True)
class _Place(Generic[_Item]):
    """Where an item stands: its priority, start tag and number; start None: it was put first."""

    item: _Item
    priority: int
    start: float | None
    number: int

    @property
    def key(self) -> tuple[bool, int, float, int]:
        return (self.start is not None, self.priority, self.start or 0.0, self.number)


class FairLine(Generic[_Item]):
    """Those who wait: by priority, then tenants in fair turns, then as they came."""

    def __init__(self) -> None:
        self._places: list[_Place[_Item]] = []
        self._numbers = count()
        self._first_numbers = count(-1, -1)
        self._clock = 0.0
        self._ends: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[_Item]:
        return (place.item for place in self._places)

    @property
    def head(self) -> _Item:
        """Who is next.

        Raises:
            IndexError: nobody waits.
        """
        return self._places[0].item

    def add(self, item: _Item) -> None:
        """Put an item in its place."""
        if not self._places:
            self._clock = 0.0
            self._ends.clear()
        if len(self._ends) > _MOST_ENDS:
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._clock}
        request = item.request
        start = max(self._clock, self._ends.get(request.tenant, 0.0))
        self._ends[request.tenant] = start + request.work
        insort(self._places, _Place(item, request.priority, start, next(self._numbers)), key=lambda place: place.key)

    def put_first(self, items: Iterable[_Item]) -> None:
        """Ahead of everyone, whatever their priority: the first of them comes to stand behind the others of them."""
        for item in items:
            self._places.insert(0, _Place(item, item.request.priority, None, next(self._first_numbers)))

    def pop(self) -> _Item:
        """Take out the head.

        Raises:
            IndexError: nobody waits.
        """
        place = self._places.pop(0)
        self._clock = max(self._clock, place.start or 0.0)
        return place.item

    def take_out(self, is_wanted: Callable[[_Item], bool]) -> list[_Item]:
        """Take out whom a condition holds for, in their order."""
        found = [place.item for place in self._places if is_wanted(place.item)]
        self._places = [place for place in self._places if not is_wanted(place.item)]
        return found
