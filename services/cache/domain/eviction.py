"""Which entries leave when room is needed: pure functions over plain data, which every directory follows.

Each use of an entry gives it a *score*, which stays until its next use. Room is made from the lowest scores; equal ones
leave in key order. The *clock* is the highest score that was ever evicted: policies that start new scores from it let
entries age by what came after them, however often they were used before.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

__all__ = [
    "POLICIES",
    "Candidate",
    "Need",
    "Policy",
    "TenantRoom",
    "Use",
    "choose_victims",
    "greedy_dual_size_frequency",
    "least_frequently_used_with_ageing",
    "least_recently_used",
    "share_of_each",
]


class Use(NamedTuple):
    """One use of an entry. uses: how often it was used since it was stored, this use counted; clock: see above.

    `num_tokens` stands for the seconds that a hit saves: a model's tokens cost about the same each, so that the rate
    drops out of every comparison. `size_bytes` is one copy, `now` seconds.
    """

    uses: int
    num_tokens: int
    size_bytes: int
    now: float
    clock: float


Policy = Callable[[Use], float]


def least_recently_used(use: Use) -> float:
    """The second of the last use."""
    return use.now


def least_frequently_used_with_ageing(use: Use) -> float:
    """Clock plus uses: LFU with dynamic ageing (Arlitt and others, 2000)."""
    return use.clock + use.uses


def greedy_dual_size_frequency(use: Use) -> float:
    """Clock plus uses times what a hit saves per byte (Cherkasova, 1998); what both directories follow."""
    return use.clock + use.uses * use.num_tokens / use.size_bytes


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"lru": least_recently_used, "lfu": least_frequently_used_with_ageing, "gdsf": greedy_dual_size_frequency}
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that neither a lease nor a pin protects. `held_bytes` counts every copy."""

    key: bytes
    held_bytes: int
    score: float


@dataclass(frozen=True, slots=True)
class TenantRoom:
    """What a tenant holds in all copies, protected ones included, and its candidates by score and key.

    `has_share`: others may not bring it below its share.
    """

    used_bytes: int
    has_share: bool
    candidates: Iterable[Candidate]


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that must become free for a tenant: of its own, and of anybody's. Neither below 1 asks for nothing."""

    tenant: str
    own_bytes: int
    any_bytes: int


def share_of_each(budget_bytes: int, num_tenants: int) -> float:
    """The bytes that each of so many tenants may call its own."""
    return budget_bytes / max(num_tenants, 1)


def choose_victims(need: Need, tenants: Mapping[str, TenantRoom], share_bytes: float) -> tuple[Candidate, ...] | None:
    """What to evict, in order; None when that cannot free enough, and then nothing is to be evicted.

    First own candidates until the tenant is within its bound, then the lowest score of all. A tenant with a share
    is passed over, whatever else it has, once its lowest candidate would take it below the share; the one that needs
    the room never is.
    """
    queues = {name: _Queue(room) for name, room in tenants.items()}
    victims: list[Candidate] = []
    freed = 0
    own = queues.get(need.tenant)
    while freed < need.own_bytes:
        if own is None or own.head is None:
            return None
        victims.append(own.take())
        freed += victims[-1].held_bytes
    order = [(queue.head.score, queue.head.key, name) for name, queue in queues.items() if queue.head]
    heapq.heapify(order)
    while freed < need.any_bytes:
        if not order:
            return None
        name = heapq.heappop(order)[-1]
        queue = queues[name]
        if name != need.tenant and not queue.can_give(share_bytes):
            continue
        victims.append(queue.take())
        freed += victims[-1].held_bytes
        if queue.head:
            heapq.heappush(order, (queue.head.score, queue.head.key, name))
    return tuple(victims)


class _Queue:
    """A tenant's candidates while some are taken away."""

    def __init__(self, room: TenantRoom) -> None:
        self._left_bytes = room.used_bytes
        self._has_share = room.has_share
        self._candidates: Iterator[Candidate] = iter(room.candidates)
        self.head = next(self._candidates, None)

    def can_give(self, share_bytes: float) -> bool:
        """Whether the next candidate may go for another tenant's sake."""
        return self.head is not None and (not self._has_share or self._left_bytes - self.head.held_bytes >= share_bytes)

    def take(self) -> Candidate:
        """The next candidate, which leaves."""
        if self.head is None:
            raise LookupError("no candidate is left")
        taken, self.head = self.head, next(self._candidates, None)
        self._left_bytes -= taken.held_bytes
        return taken
