"""Which entries leave when room is needed: the least recently used of those that no lease protects."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Candidate", "choose_victims"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An unleased entry. `held_bytes` counts every copy; `used_at` is the second of its last plan or publish."""

    key: bytes
    held_bytes: int
    used_at: float


def choose_victims(candidates: Iterable[Candidate], needed_bytes: int) -> tuple[bytes, ...] | None:
    """The keys to evict so that `needed_bytes` become free, oldest first; ties leave in key order.

    Returns an empty tuple when nothing is needed, and None when all candidates together do not free enough: then
    nothing is to be evicted.
    """
    victims: list[bytes] = []
    missing = needed_bytes
    for candidate in sorted(candidates, key=lambda one: (one.used_at, one.key)):
        if missing <= 0:
            break
        victims.append(candidate.key)
        missing -= candidate.held_bytes
    return tuple(victims) if missing <= 0 else None
