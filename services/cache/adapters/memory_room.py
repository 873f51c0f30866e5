"""What the in-memory directory knows of room: bytes by tenant, the order in which entries leave, and who has a share."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from services.cache.domain.admission import MAX_SIGHTINGS
from services.cache.domain.eviction import Candidate, Need, TenantRoom, choose_victims, share_of_each
from services.cache.domain.values import Limits

__all__ = ["Room"]


@dataclass(slots=True)
class Room:
    """Changes only through its methods, which the tables call with every copy and every use.

    bytes_of: what each tenant holds; budgets: of tenants that have their own; seen_at: tenants that have a share, by their
    last plan; clock: see
    `domain/eviction.py`; sightings: how often absent keys were planned, the last one at the end.
    """

    limits: Limits
    used_bytes: int = 0
    clock: float = 0.0
    bytes_of: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    budgets: dict[str, int] = field(default_factory=dict)
    seen_at: OrderedDict[str, float] = field(default_factory=OrderedDict)
    sightings: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    _idle: defaultdict[str, "SortedList[tuple[float, bytes]]"] = field(default_factory=lambda: defaultdict(SortedList))
    _place: dict[bytes, tuple[str, float]] = field(default_factory=dict)

    def idle_keys(self) -> dict[str, frozenset[bytes]]:
        """Everything that may be evicted, by tenant."""
        return {tenant: frozenset(key for _, key in order) for tenant, order in self._idle.items()}

    def see_tenant(self, tenant: str, now: float) -> None:
        """Give a tenant its share from now on."""
        self.seen_at[tenant] = now
        self.seen_at.move_to_end(tenant)

    def forget_tenants(self, now: float) -> None:
        """Take the share of tenants that have not planned for long."""
        while self.seen_at and next(iter(self.seen_at.values())) + self.limits.share_seconds <= now:
            self.seen_at.popitem(last=False)

    def sight(self, key: bytes) -> int:
        """Count a plan of an absent key; how many there have been."""
        self.sightings[key] = self.sightings.get(key, 0) + 1
        self.sightings.move_to_end(key)
        if len(self.sightings) > MAX_SIGHTINGS:
            self.sightings.popitem(last=False)
        return self.sightings[key]

    def set_idle(self, key: bytes, tenant: str, score: float) -> None:
        """Let a key be evicted in the order of its score."""
        if key in self._place:
            self.set_busy(key)
        self._idle[tenant].add((score, key))
        self._place[key] = (tenant, score)

    def set_busy(self, key: bytes) -> None:
        """Keep a key from being evicted."""
        place = self._place.pop(key, None)
        if place:
            tenant, score = place
            self._idle[tenant].remove((score, key))
            if not self._idle[tenant]:
                del self._idle[tenant]

    def count_copy(self, tenant: str, size_bytes: int) -> None:
        """Add a copy's bytes; negative ones take it away."""
        self.used_bytes += size_bytes
        self.bytes_of[tenant] += size_bytes
        if not self.bytes_of[tenant]:
            del self.bytes_of[tenant]

    def budget_of(self, tenant: str) -> int:
        """The bytes that a tenant may hold."""
        own = self.budgets.get(tenant) or self.limits.namespace_budget_bytes
        return min(own or self.limits.budget_bytes, self.limits.budget_bytes)

    def candidates(self, tenant: str, held_bytes: Callable[[bytes], int]) -> Iterator[Candidate]:
        """What may be evicted of a tenant, in order; `held_bytes`: all copies of a key."""
        return (Candidate(key, held_bytes(key), score) for score, key in self._idle.get(tenant, ()))

    def fits(self, tenant: str, size_bytes: int) -> bool:
        """Whether so many bytes find room without evicting."""
        need = self._need(tenant, size_bytes)
        return need.own_bytes <= 0 and need.any_bytes <= 0

    def victims(
        self, tenant: str, size_bytes: int, spared: bytes, held_bytes: Callable[[bytes], int]
    ) -> tuple[Candidate, ...] | None:
        """What to evict before a tenant's bytes fit; None when they cannot. `held_bytes`: all copies of a key."""
        need = self._need(tenant, size_bytes)
        if need.own_bytes <= 0 and need.any_bytes <= 0:
            return ()

        def others(name: str) -> Iterator[Candidate]:
            return (one for one in self.candidates(name, held_bytes) if one.key != spared)

        rooms = {name: TenantRoom(used, name in self.seen_at, others(name)) for name, used in self.bytes_of.items()}
        return choose_victims(need, rooms, share_of_each(self.limits.budget_bytes, len(self.seen_at)))

    def own_excess(self, tenant: str, size_bytes: int) -> int:
        """Bytes that a tenant would hold with so many more beyond a budget of its own; 0 where it may have the whole one."""
        is_bounded = self.budget_of(tenant) < self.limits.budget_bytes
        return max(self._need(tenant, size_bytes).own_bytes, 0) if is_bounded else 0

    def _need(self, tenant: str, size_bytes: int) -> Need:
        return Need(
            tenant,
            self.bytes_of.get(tenant, 0) + size_bytes - self.budget_of(tenant),
            self.used_bytes + size_bytes - self.limits.budget_bytes,
        )
