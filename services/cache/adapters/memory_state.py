"""The tables of the in-memory directory, and the small steps that keep them in agreement.

`lua/prelude.lua` holds the same steps for Redis, under the same names.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from sortedcontainers import SortedList

from services.cache.adapters.memory_documents import DocumentTable
from services.cache.adapters.memory_evictions import Evictions
from services.cache.adapters.memory_past import Past
from services.cache.adapters.memory_room import Room
from services.cache.domain.changes import Change, Linked
from services.cache.domain.eviction import Candidate, Use, greedy_dual_size_frequency
from services.cache.domain.evictions import EvictionReason
from services.cache.domain.values import EntryKind, Epochs, Limits, Removal, RemovedCopy
from services.cache.domain.workers import WorkerRecord

__all__ = ["Entry", "Lease", "OwnedTicket", "Tables", "Worker"]


@dataclass(slots=True)
class Entry:
    """A published key. `uses` and `score`: see `domain/eviction.py`; `tiers`: the tier of each holder's copy."""

    kind: EntryKind
    tenant: str
    num_tokens: int
    size_bytes: int
    fence: int
    ticket_id: str
    uses: int = 0
    score: float = 0.0
    tiers: dict[str, str] = field(default_factory=dict)
    leases: set[str] = field(default_factory=set)


@dataclass(slots=True)
class OwnedTicket:
    """A ticket and the lease that planned it; `dead` once its key was invalidated."""

    key: bytes
    kind: EntryKind
    num_tokens: int
    fence: int
    lease_id: str
    expires_at: float
    dead: bool = False


@dataclass(slots=True)
class Lease:
    """Protected keys and owned tickets."""

    expires_at: float
    keys: set[bytes] = field(default_factory=set)
    ticket_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Worker:
    """A living worker. `held`: when each copy was published; `marked`: since when a copy is to be dropped."""

    record: WorkerRecord
    expires_at: float
    held: dict[bytes, float] = field(default_factory=dict)
    marked: dict[bytes, float] = field(default_factory=dict)


@dataclass(slots=True)
class Tables:
    """All state. Every method leaves the indexes in agreement. `changes`: made, but not yet in the journal.

    next_expiry: no lease, ticket or worker ends before.
    """

    limits: Limits
    now: float = 0.0
    next_expiry: float = math.inf
    sequence: int = 0
    room: Room = field(init=False)
    evictions: Evictions = field(init=False)
    past: Past = field(init=False)
    documents: DocumentTable = field(default_factory=DocumentTable)
    entries: dict[bytes, Entry] = field(default_factory=dict)
    tickets: dict[str, OwnedTicket] = field(default_factory=dict)
    ticket_of: dict[bytes, str] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    changes: list[Change] = field(default_factory=list)
    by_age: "SortedList[tuple[int, bytes]]" = field(default_factory=SortedList)
    scopes_of: defaultdict[bytes, set[str]] = field(default_factory=lambda: defaultdict(set))
    keys_of_scope: defaultdict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self.room = Room(self.limits)
        self.evictions = Evictions(self.limits)
        self.past = Past(self.limits.max_remembered)

    def current_epochs(self, tenant: str, model: str) -> Epochs:
        """Epochs of two scopes."""
        return Epochs(self.past.epoch_of(tenant), self.past.epoch_of(model))

    def tenant_of(self, key: bytes) -> str:
        """The scope of the tenant of a key that is ticketed or published."""
        return next(scope for scope in self.scopes_of[key] if scope.startswith("tenant:"))

    def next_sequence(self) -> int:
        """A number above all earlier ones, also above those of an earlier life: it follows the clock's microseconds."""
        self.sequence = max(self.sequence + 1, int(self.now * 1e6))
        return self.sequence

    def raise_sequence(self, floor: int) -> None:
        """Let later numbers lie above this one."""
        self.sequence = max(self.sequence, floor)

    def sweep(self, now: float) -> None:
        """Remove what time has ended."""
        self.now = now
        self.room.forget_tenants(now)
        while self.by_age and self.is_over_age(self.by_age[0][0]):
            self.remove_entry(self.by_age[0][1])
        if now >= self.next_expiry:
            self._end_expired()

    def _end_expired(self) -> None:
        for lease_id in [name for name, lease in self.leases.items() if lease.expires_at <= self.now]:
            self.end_lease(lease_id)
        for ticket_id in [name for name, ticket in self.tickets.items() if ticket.expires_at <= self.now]:
            self.end_ticket(ticket_id)
        for worker_id in [name for name, worker in self.workers.items() if worker.expires_at <= self.now]:
            for key in list(self.workers[worker_id].held):
                self.remove_copy(key, worker_id)
            del self.workers[worker_id]
        lives: Iterable[Lease | OwnedTicket | Worker]
        lives = chain(self.leases.values(), self.tickets.values(), self.workers.values())
        self.next_expiry = min((life.expires_at for life in lives), default=math.inf)

    def expires_in(self, seconds: float) -> float:
        """The moment at which a lease, ticket or worker is to end, unless it is put off; `sweep` looks then."""
        self.next_expiry = min(self.next_expiry, self.now + seconds)
        return self.now + seconds

    def is_over_age(self, fence: int) -> bool:
        """Whether an entry has lived its time: its fence tells the microsecond at which its ticket was given."""
        seconds = self.limits.entry_ttl_seconds
        return seconds > 0 and fence <= (self.now - seconds) * 1e6

    def link(self, key: bytes, scope: str) -> None:
        """Let a key fall with a scope."""
        if scope in self.scopes_of[key]:
            return
        self.scopes_of[key].add(scope)
        self.keys_of_scope[scope].add(key)
        if key in self.entries:
            self._link_published(key, scope)

    def _link_published(self, key: bytes, scope: str) -> None:
        """Receipts of a published key do not say what it falls with since."""
        sequence = self.next_sequence()
        self.past.link(key, scope, sequence)
        self.past.trim()
        self.changes.append(Linked(key, scope, sequence))
        if scope in self.pinned:
            self.settle(key)

    def unlink(self, key: bytes) -> None:
        """Forget all scopes of a key that is free now."""
        for scope in self.scopes_of.pop(key, set()):
            keys = self.keys_of_scope[scope]
            keys.discard(key)
            if not keys:
                del self.keys_of_scope[scope]

    def lease_entry(self, lease_id: str, key: bytes) -> None:
        """Protect an entry."""
        self.leases[lease_id].keys.add(key)
        self.entries[key].leases.add(lease_id)
        self.room.set_busy(key)

    def end_lease(self, lease_id: str) -> None:
        """Remove a lease; its tickets stay."""
        for key in self.leases.pop(lease_id).keys:
            self.entries[key].leases.discard(lease_id)
            self.settle(key)

    def settle(self, key: bytes) -> None:
        """Let an entry be evicted, or not, as leases and pins have it."""
        entry = self.entries[key]
        if entry.leases or self._is_pinned(key, entry):
            self.room.set_busy(key)
        else:
            self.room.set_idle(key, entry.tenant, entry.score)

    def _is_pinned(self, key: bytes, entry: Entry) -> bool:
        """Snapshots are not: every prompt with a pinned document would leave one that stays for ever."""
        is_segment = entry.kind is EntryKind.SEGMENT
        return bool(self.pinned) and is_segment and not self.pinned.isdisjoint(self.scopes_of[key])

    def add_entry(self, key: bytes, entry: Entry) -> None:
        """Publish a key whose scopes are linked."""
        self.entries[key] = entry
        self.evictions.forget(key)
        self.by_age.add((entry.fence, key))
        self.count_use(entry)
        self.settle(key)

    def count_use(self, entry: Entry) -> None:
        """Give an entry the score of one more use, in whose order it may be evicted when it is settled next."""
        entry.uses += 1
        use = Use(entry.uses, entry.num_tokens, entry.size_bytes, self.now, self.room.clock)
        entry.score = greedy_dual_size_frequency(use)

    def end_ticket(self, ticket_id: str) -> None:
        """Remove a ticket, and free its key."""
        key = self.forget_ticket(ticket_id).key
        if self.ticket_of.get(key) == ticket_id:
            del self.ticket_of[key]
            self.unlink(key)

    def forget_ticket(self, ticket_id: str) -> OwnedTicket:
        """Remove a ticket's record; what its key is afterwards is the caller's to settle."""
        ticket = self.tickets.pop(ticket_id)
        lease = self.leases.get(ticket.lease_id)
        if lease:
            lease.ticket_ids.discard(ticket_id)
        return ticket

    def kill_ticket(self, key: bytes) -> None:
        """Free an invalidated key; the ticket's record stays to answer its publish."""
        self.tickets[self.ticket_of.pop(key)].dead = True
        self.unlink(key)

    def add_copy(self, key: bytes, worker_id: str, tier: str) -> None:
        """Note a new holder of an entry."""
        entry, worker = self.entries[key], self.workers[worker_id]
        entry.tiers[worker_id] = tier
        worker.held[key] = self.now
        worker.marked.pop(key, None)
        self.room.count_copy(entry.tenant, entry.size_bytes)

    def remove_copy(self, key: bytes, worker_id: str) -> None:
        """Forget a holder, and the entry with its last one."""
        entry = self.entries[key]
        del entry.tiers[worker_id]
        del self.workers[worker_id].held[key]
        self.room.count_copy(entry.tenant, -entry.size_bytes)
        if not entry.tiers:
            self.room.set_busy(key)
            self.by_age.remove((entry.fence, key))
            for lease_id in entry.leases:
                self.leases[lease_id].keys.discard(key)
            del self.entries[key]
            self.unlink(key)

    def remove_entry(self, key: bytes) -> list[RemovedCopy]:
        """Take an entry out of the index and mark its copies for dropping; the copies."""
        entry = self.entries[key]
        copies = [RemovedCopy(key, worker_id, tier, entry.size_bytes) for worker_id, tier in entry.tiers.items()]
        for copy in copies:
            self.workers[copy.worker_id].marked[key] = self.now
            self.remove_copy(key, copy.worker_id)
        return copies

    def remove_scope(self, scope: str, epoch: int) -> Removal:
        """Advance a scope's epoch, and free its keys and those of the documents that fall with it."""
        copies: list[RemovedCopy] = []
        documents = self.documents.remove(scope, epoch)
        for each in dict.fromkeys((scope, *documents)):
            copies += self._free_scope(each, epoch)
        return Removal(len({copy.key for copy in copies}), len(documents), tuple(copies))

    def _free_scope(self, scope: str, epoch: int) -> list[RemovedCopy]:
        self.past.advance(scope, epoch)
        copies: list[RemovedCopy] = []
        for key in list(self.keys_of_scope.get(scope, ())):
            if key in self.entries:
                copies += self.remove_entry(key)
            else:
                self.kill_ticket(key)
        return copies

    def victims(self, tenant: str, size_bytes: int, spared: bytes) -> tuple[Candidate, ...] | None:
        """What to evict before `size_bytes` of a tenant fit, first for its own budget; None when they cannot."""
        return self.room.victims(tenant, size_bytes, spared, self._held_bytes)

    def excess(self, tenant: str) -> tuple[Candidate, ...]:
        """What to evict so that the budgets are kept; all that is idle where that does not do."""
        found = self.victims(tenant, 0, b"")
        return tuple(self.room.candidates(tenant, self._held_bytes)) if found is None else found

    def _held_bytes(self, key: bytes) -> int:
        entry = self.entries[key]
        return entry.size_bytes * len(entry.tiers)

    def evict_for(self, tenant: str, victims: Sequence[Candidate], own_bytes: int) -> int:
        """Make room for a tenant's entry, first so many bytes for its own budget; how many were evicted for that."""
        held = accumulate((victim.held_bytes for victim in victims), initial=0)
        num_own = sum(freed < own_bytes for freed in list(held)[:-1])
        for victim in victims:
            entry = self.entries[victim.key]
            self.evictions.note_pair(tenant, entry.tenant, victim.held_bytes, entry.num_tokens)
        self.evict(victims[:num_own], EvictionReason.TENANT_BUDGET)
        self.evict(victims[num_own:], EvictionReason.ROOM)
        return num_own

    def evict(self, victims: Iterable[Candidate], reason: EvictionReason) -> None:
        """Remove entries for room."""
        for victim in victims:
            self.room.clock = max(self.room.clock, victim.score)
            self.remove_entry(victim.key)
            self.evictions.note(victim.key, victim.held_bytes, reason)
