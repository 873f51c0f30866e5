"""What the in-memory directory knows of the past: when scopes were invalidated, and what old receipts do not say.

`lua/prelude.lua` holds the same steps for Redis, under the same names.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from services.cache.domain.changes import Change, Floor, Invalidated, Linked

__all__ = ["Past"]


@dataclass(slots=True)
class Past:
    """Outlives entries, since copies come back from workers that were away, with receipts of their time.

    Bounded by `capacity`: what is oldest is forgotten, and `floor` rises to it, below which no receipt is good any more.
    Tenants and models are few, and never forgotten: their epochs enter every key.

    epochs: sequence number of each scope's last invalidation; links: scopes that published keys fall with beyond their
    receipts, and since when.
    """

    capacity: int
    floor: int = 0
    epochs: dict[str, int] = field(default_factory=dict)
    links: defaultdict[bytes, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    _order: "SortedList[tuple[int, bytes, str]]" = field(default_factory=SortedList)

    def epoch_of(self, scope: str) -> int:
        """0 when there was no invalidation, or it is forgotten."""
        return self.epochs.get(scope, 0)

    def advance(self, scope: str, epoch: int) -> None:
        """Note an invalidation."""
        self.drop(scope)
        self.epochs[scope] = epoch
        if _is_forgettable(scope):
            self._order.add((epoch, b"", scope))

    def drop(self, scope: str) -> None:
        """Forget a scope's invalidation, where something else tells its epoch from now on."""
        epoch = self.epochs.pop(scope, None)
        if epoch is not None and _is_forgettable(scope):
            self._order.remove((epoch, b"", scope))

    def link(self, key: bytes, scope: str, sequence: int) -> None:
        """Note that copies of a key that were published before fall with one more scope."""
        if scope not in self.links[key]:
            self.links[key][scope] = sequence
            self._order.add((sequence, key, scope))

    def raise_floor(self, sequence: int) -> None:
        """No receipt up to this number is good."""
        self.floor = max(self.floor, sequence)

    def members(self) -> frozenset[tuple[bytes, str]]:
        """What is forgotten one day: scopes of links by key, and invalidated scopes without one."""
        return frozenset((key, scope) for _, key, scope in self._order)

    def changes(self) -> Iterator[Change]:
        """Everything, as changes that lead to it."""
        if self.floor:
            yield Floor(self.floor)
        for scope, epoch in self.epochs.items():
            yield Invalidated(scope, epoch)
        for key, scopes in self.links.items():
            for scope, sequence in scopes.items():
                yield Linked(key, scope, sequence)

    def trim(self) -> None:
        """Forget the oldest beyond the capacity; asked for behind every change."""
        while len(self._order) > self.capacity:
            oldest, key, scope = self._order.pop(0)
            self.raise_floor(oldest)
            if not key:
                del self.epochs[scope]
                continue
            del self.links[key][scope]
            if not self.links[key]:
                del self.links[key]


def _is_forgettable(scope: str) -> bool:
    return not scope.startswith(("tenant:", "model:"))
