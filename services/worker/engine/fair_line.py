"""A line in which no tenant's requests hold up another's: start-time fair queueing (Goyal, Vin and Cheng, 1996).

Within a priority every tenant has a flow of requests. The first of a flow has a start tag: where the tenant's one before ended,
but not before the tag of what has left last; a request ends behind its start by the work that it brings. Whoever has the least
tag is next, so that a tenant with one request meets at most one of each other's, however many these have sent. What gives up
while it waits, or waits at another priority, counts for nothing. Tags depend on what came and left alone, on no clock: ranks
of a group agree.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Protocol, TypeVar

from services.worker.engine.requests import GenerateRequest

__all__ = ["FairLine"]


class _Requesting(Protocol):
    @property
    def request(self) -> GenerateRequest: ...


# Ends that are known of tenants that wait no more; those behind which a level is already say nothing.
_MOST_ENDS = 4096

_Item = TypeVar("_Item", bound=_Requesting)


@dataclass(frozen=True, slots=True)
class _Place(Generic[_Item]):
    number: int
    item: _Item


@dataclass(slots=True)
class _Flow(Generic[_Item]):
    """One tenant's at one priority. start: tag of the first."""

    start: float
    places: deque[_Place[_Item]] = field(default_factory=deque)


@dataclass(slots=True)
class _Level(Generic[_Item]):
    """One priority. clock: the greatest tag of what has left; ends: by tenant, of what has left."""

    clock: float = 0.0
    flows: dict[bytes, _Flow[_Item]] = field(default_factory=dict)
    ends: dict[bytes, float] = field(default_factory=dict)

    def add(self, place: _Place[_Item]) -> None:
        tenant = place.item.request.tenant
        if tenant not in self.flows:
            self.flows[tenant] = _Flow(max(self.clock, self.ends.get(tenant, 0.0)))
        self.flows[tenant].places.append(place)

    def first(self) -> _Flow[_Item]:
        return min(self.flows.values(), key=lambda flow: (flow.start, flow.places[0].number))

    def serve(self, item: _Item) -> None:
        flow = self.flows[item.request.tenant]
        flow.places = deque(place for place in flow.places if place.item is not item)
        self.clock = max(self.clock, flow.start)
        flow.start += item.request.work
        if not flow.places:
            self._leave(item.request.tenant)

    def take_out(self, is_wanted: Callable[[_Item], bool]) -> None:
        for tenant in list(self.flows):
            flow = self.flows[tenant]
            flow.places = deque(place for place in flow.places if not is_wanted(place.item))
            if not flow.places:
                self._leave(tenant)

    def _leave(self, tenant: bytes) -> None:
        self.ends[tenant] = self.flows.pop(tenant).start
        if len(self.ends) > _MOST_ENDS:
            self.ends = {own: end for own, end in self.ends.items() if end > self.clock}

    def __iter__(self) -> Iterator[_Item]:
        """In the order in which they would leave."""
        heads = [(flow.start, flow.places[0].number, 0, tenant) for tenant, flow in self.flows.items()]
        heapq.heapify(heads)
        while heads:
            start, _, index, tenant = heapq.heappop(heads)
            places = self.flows[tenant].places
            item = places[index].item
            if index + 1 < len(places):
                heapq.heappush(heads, (start + item.request.work, places[index + 1].number, index + 1, tenant))
            yield item


class FairLine(Generic[_Item]):
    """Those who wait: by priority, then tenants in fair turns, then as they came."""

    def __init__(self) -> None:
        self._first: deque[_Item] = deque()
        self._levels: dict[int, _Level[_Item]] = {}
        self._numbers = count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[_Item]:
        yield from self._first
        for priority in sorted(self._levels):
            yield from self._levels[priority]

    @property
    def head(self) -> _Item:
        """Who is next.

        Raises:
            IndexError: nobody waits.
        """
        if self._first:
            return self._first[0]
        return self._level().first().places[0].item

    def add(self, item: _Item) -> None:
        """Put an item in its place."""
        self._levels.setdefault(item.request.priority, _Level()).add(_Place(next(self._numbers), item))
        self._size += 1

    def put_first(self, items: Iterable[_Item]) -> None:
        """Ahead of everyone, whatever their priority: the first of them comes to stand behind the others of them."""
        for item in items:
            self._first.appendleft(item)
            self._size += 1

    def pop(self) -> _Item:
        """Take out the head.

        Raises:
            IndexError: nobody waits.
        """
        item = self.head
        self.serve(item)
        return item

    def serve(self, item: _Item) -> None:
        """Take out one of those who wait, which has its tenant's turn; those before it keep their places."""
        if any(own is item for own in self._first):
            self._first = deque(own for own in self._first if own is not item)
        else:
            self._levels[item.request.priority].serve(item)
        self._size -= 1
        self._forget()

    def take_out(self, is_wanted: Callable[[_Item], bool]) -> list[_Item]:
        """Take out whom a condition holds for, in their order."""
        found = [item for item in self if is_wanted(item)]
        self._first = deque(item for item in self._first if not is_wanted(item))
        for level in self._levels.values():
            level.take_out(is_wanted)
        self._size -= len(found)
        self._forget()
        return found

    def find_displaced(self, new: _Item) -> _Item | None:
        """Who is to go for a new one where the line is full: the last one of the tenant with the most waiting, which brings the
        most work of those with as many; None where that is the new one's tenant, or all of these are more urgent.
        """
        lined = [item for priority in sorted(self._levels) for item in self._levels[priority]]
        own = new.request.tenant
        waiting, work = Counter([own]), Counter[bytes]()
        for item in lined:
            waiting[item.request.tenant] += 1
            work[item.request.tenant] += item.request.work
        most = max(waiting, key=lambda tenant: (waiting[tenant], tenant == own, work[tenant], tenant))
        if most == own:
            return None
        *_, last = (item for item in lined if item.request.tenant == most)
        return last if last.request.priority >= new.request.priority else None

    def _level(self) -> _Level[_Item]:
        if not self._levels:
            raise IndexError("nobody waits")
        return self._levels[min(self._levels)]

    def _forget(self) -> None:
        """What an empty level has served says nothing of what comes."""
        self._levels = {priority: level for priority, level in self._levels.items() if level.flows}
