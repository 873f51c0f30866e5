"""The time of a simulation."""

import heapq
import itertools
from collections.abc import Callable

__all__ = ["Clock"]


class Clock:
    """What is to happen when; equal moments in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Let something happen, now or later."""
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def advance(self, until: float | None) -> bool:
        """Go to the next moment before `until` and let all of it happen; False, at `until`, where there is none."""
        events = self._events
        if not events or (until is not None and events[0][0] >= until):
            self.now = self.now if until is None else until
            return False
        self.now = events[0][0]
        while events and events[0][0] == self.now:
            heapq.heappop(events)[2]()
        return True
