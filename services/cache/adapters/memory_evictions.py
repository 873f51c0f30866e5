"""What the in-memory directory remembers of evictions; `lua/remembering.lua` does the same in Redis."""

from collections import OrderedDict
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from services.cache.domain.evictions import Eviction, EvictionReason, Miss, MissCause
from services.cache.domain.values import Limits

__all__ = ["Evictions"]


@dataclass(slots=True)
class _Pair:
    """rank: decides who stays in the table; a pair that pushes another one out takes on its rank, so that none that goes on
    evicting is pushed out for ever.
    """

    rank: int
    num_entries: int = 0
    size_bytes: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class Evictions:
    """Both tables are bounded. _ghosts: number and bytes of what was evicted for the whole budget, the oldest first; _own: what
    was evicted for its tenant's.
    """

    limits: Limits
    _pairs: dict[tuple[str, str], _Pair] = field(default_factory=dict)
    _ghosts: OrderedDict[bytes, tuple[int, int]] = field(default_factory=OrderedDict)
    _numbers: "SortedList[int]" = field(default_factory=SortedList)
    _ghost_bytes: int = 0
    _next: int = 0
    _own: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def note(self, key: bytes, size_bytes: int, reason: EvictionReason) -> None:
        """An entry with these bytes in all copies leaves."""
        if reason is EvictionReason.TENANT_BUDGET:
            self._own[key] = None
            if len(self._own) > self.limits.max_ghosts:
                self._own.popitem(last=False)
            return
        self._next += 1
        self._ghosts[key] = (self._next, size_bytes)
        self._numbers.add(self._next)
        self._ghost_bytes += size_bytes
        if len(self._ghosts) > self.limits.max_ghosts:
            self.forget(next(iter(self._ghosts)))

    def note_pair(self, evictor: str, victim: str, size_bytes: int, num_tokens: int) -> None:
        """An entry of one tenant made room for another's."""
        pair = self._pairs.get((evictor, victim))
        if pair is None:
            rank = 0
            if len(self._pairs) >= self.limits.max_eviction_pairs:
                lowest = min(self._pairs, key=lambda names: (self._pairs[names].rank, names))
                rank = self._pairs.pop(lowest).rank
            pair = self._pairs[evictor, victim] = _Pair(rank)
        pair.rank += 1
        pair.num_entries += 1
        pair.size_bytes += size_bytes
        pair.num_tokens += num_tokens

    def forget(self, key: bytes) -> None:
        """It is stored again."""
        self._own.pop(key, None)
        number, size_bytes = self._ghosts.pop(key, (0, 0))
        if number:
            self._numbers.remove(number)
            self._ghost_bytes -= size_bytes

    def miss_of(self, key: bytes) -> Miss:
        """Why an absent key is absent."""
        ghost = self._ghosts.get(key)
        if ghost:
            num_later = len(self._numbers) - self._numbers.bisect_left(ghost[0])
            return Miss(MissCause.ROOM, num_later * self._ghost_bytes // len(self._ghosts))
        return Miss(MissCause.TENANT_BUDGET if key in self._own else MissCause.NEW)

    def rows(self) -> tuple[Eviction, ...]:
        """Who evicted whom, most entries first."""
        found = (
            Eviction(evictor, victim, pair.num_entries, pair.size_bytes, pair.num_tokens)
            for (evictor, victim), pair in self._pairs.items()
        )
        return tuple(sorted(found, key=lambda row: (-row.num_entries, row.evictor, row.victim)))
