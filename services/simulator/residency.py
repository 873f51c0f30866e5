"""Which virtual workers hold which states, and what leaves when a worker's room is full."""

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.cache.domain.eviction import Policy, Use
from services.router.domain.assignment import ColdSegment
from services.simulator.ways import Window

__all__ = ["Held", "Residency", "Room"]


@dataclass(slots=True)
class Held:
    """A worker's copy of a state. since: when it is there; pins: requests that are to use it."""

    segment: ColdSegment
    since: Window
    pins: int = 0
    uses: int = 1
    score: float = 0.0


@dataclass(slots=True)
class Room:
    """One worker's memory for states. capacity_bytes None: it is never full."""

    policy: Policy
    capacity_bytes: int | None
    held: dict[bytes, Held] = field(default_factory=dict)
    used_bytes: int = 0
    clock: float = 0.0
    evictions: int = 0
    # What may leave, by score; entries that have been used or pinned since are passed over.
    _order: list[tuple[float, bytes]] = field(default_factory=list)

    def use(self, key: bytes, now: float) -> None:
        """Count a further use of a copy."""
        held = self.held[key]
        held.uses += 1
        self._rate(held, now)

    def pin(self, key: bytes) -> None:
        """Keep a copy until `release`."""
        self.held[key].pins += 1

    def release(self, key: bytes) -> None:
        """Take a pin back."""
        held = self.held[key]
        held.pins -= 1
        if not held.pins:
            self._offer(held)

    def put(self, segment: ColdSegment, since: Window, now: float) -> list[bytes]:
        """Take a copy, which is its first use; returns what left for it. Pinned copies may exceed the room for a while."""
        gone = self._make_room(segment.num_bytes)
        self.held[segment.key] = held = Held(segment, since)
        self.used_bytes += segment.num_bytes
        self._rate(held, now)
        return gone

    def _rate(self, held: Held, now: float) -> None:
        segment = held.segment
        held.score = self.policy(Use(held.uses, segment.num_tokens, max(segment.num_bytes, 1), now, self.clock))
        if not held.pins:
            self._offer(held)

    def _offer(self, held: Held) -> None:
        if self.capacity_bytes is not None:
            heapq.heappush(self._order, (held.score, held.segment.key))

    def _make_room(self, num_bytes: int) -> list[bytes]:
        gone: list[bytes] = []
        while self.capacity_bytes is not None and self.used_bytes + num_bytes > self.capacity_bytes and self._order:
            score, key = heapq.heappop(self._order)
            held = self.held.get(key)
            if held is None or held.pins or held.score != score:
                continue
            self.clock = max(self.clock, score)
            self.used_bytes -= held.segment.num_bytes
            self.evictions += 1
            del self.held[key]
            gone.append(key)
        return gone


class Residency:
    """The rooms of all workers, and who holds what."""

    def __init__(self, names: list[str], policy: Policy, capacity_bytes: int | None) -> None:
        self.rooms: Mapping[str, Room] = {name: Room(policy, capacity_bytes) for name in names}
        self._holders: defaultdict[bytes, list[str]] = defaultdict(list)

    def holders(self, key: bytes) -> list[str]:
        """Workers with a copy, the oldest first."""
        return self._holders.get(key, [])

    def put(self, name: str, segment: ColdSegment, since: Window, now: float) -> None:
        """A worker gets a copy, unless it has one."""
        room = self.rooms[name]
        if segment.key in room.held:
            return
        for key in room.put(segment, since, now):
            self._holders[key].remove(name)
            if not self._holders[key]:
                del self._holders[key]
        self._holders[segment.key].append(name)

    def check_integrity(self) -> None:
        """Bytes add up, and holders are those who hold.

        Raises:
            AssertionError: they do not.
        """
        for name, room in self.rooms.items():
            if room.used_bytes != sum(held.segment.num_bytes for held in room.held.values()):
                raise AssertionError(f"{name} counts {room.used_bytes} bytes and holds others")
        held = {(key, name) for name, room in self.rooms.items() for key in room.held}
        if held != {(key, name) for key, names in self._holders.items() for name in names}:
            raise AssertionError("holders and what they hold differ")

    @property
    def evictions(self) -> int:
        """Of all workers."""
        return sum(room.evictions for room in self.rooms.values())
