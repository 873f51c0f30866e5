"""What a directory remembers of evictions: who made room for whom, and what more room would have kept.

An evicted key is a *ghost* until it is published again, or newer ghosts push it out. When a plan asks for one, the ghosts
evicted since, and itself, say how many bytes more the budget would have needed to keep it: under LRU that is its distance in
the stack of what was used last, beyond the budget. Under the score that directories follow it is an estimate. The bytes are
counted as ghosts times their mean size, so that a plan need not read them all.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

__all__ = ["Eviction", "EvictionReason", "Miss", "MissCause"]


class EvictionReason(StrEnum):
    """What an entry was evicted for: the whole budget was full, its tenant's own was, or a budget was lowered."""

    ROOM = "room"
    TENANT_BUDGET = "tenant_budget"
    LOWERED_BUDGET = "lowered_budget"


class MissCause(StrEnum):
    """Why a segment is absent: it was never stored as far as is remembered, or it was evicted for one of two budgets."""

    NEW = "new"
    ROOM = "room"
    TENANT_BUDGET = "tenant_budget"


class Miss(NamedTuple):
    """A segment that a plan found neither stored nor being computed. `missing_bytes`, with ROOM: see above."""

    cause: MissCause
    missing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Eviction:
    """How many entries of one tenant's scope made room for another's, or its own; bytes of all copies.

    Counted since this pair is among those that are remembered.
    """

    evictor: str
    victim: str
    num_entries: int
    size_bytes: int
    num_tokens: int
