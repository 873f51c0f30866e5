"""What the store tells its administrator."""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Eviction", "StoreDirectory", "TierUsage", "WorkerStatus", "WorkerStatuses"]


@dataclass(frozen=True, slots=True)
class Eviction:
    """How many states of one tenant made room for another's, or its own, with the bytes of all copies."""

    evictor: str
    victim: str
    num_entries: int
    size_bytes: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a worker holds in one tier; a capacity of 0 is not known."""

    tier: str
    num_states: int
    used_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as the router knows it. trouble: why it is not ready; requests of all routers, as it last reported them."""

    worker_id: str
    address: str
    roles: tuple[str, ...]
    state: str
    trouble: str
    num_running: int
    num_waiting: int
    tiers: tuple[TierUsage, ...]


class WorkerStatuses(Protocol):
    """Whoever knows the workers."""

    def statuses(self) -> tuple[WorkerStatus, ...]:
        """All, by address, reachable or not."""
        ...


class StoreDirectory(Protocol):
    """The cache service's calls about the store as a whole."""

    async def evictions(self) -> tuple[Eviction, ...]:
        """Who evicted whom, most first.

        Raises:
            HypicError: it does not answer in time.
        """
        ...
