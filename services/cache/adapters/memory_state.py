"""The tables of the in-memory directory, and the small steps that keep them in agreement.

`lua/prelude.lua` holds the same steps for Redis, under the same names.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from services.cache.adapters.memory_documents import DocumentTable
from services.cache.adapters.memory_room import Room
from services.cache.domain.eviction import Candidate, Use, greedy_dual_size_frequency
from services.cache.domain.integrity import EntryState, LeaseState, Snapshot, TicketState
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
    """All state. Every method leaves the indexes in agreement."""

    limits: Limits
    now: float = 0.0
    sequence: int = 0
    room: Room = field(init=False)
    documents: DocumentTable = field(default_factory=DocumentTable)
    entries: dict[bytes, Entry] = field(default_factory=dict)
    tickets: dict[str, OwnedTicket] = field(default_factory=dict)
    ticket_of: dict[bytes, str] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    by_age: "SortedList[tuple[int, bytes]]" = field(default_factory=SortedList)
    scopes_of: defaultdict[bytes, set[str]] = field(default_factory=lambda: defaultdict(set))
    keys_of_scope: defaultdict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self.room = Room(self.limits)

    def current_epochs(self, tenant: str, model: str) -> Epochs:
        """Epochs of two scopes."""
        return Epochs(self.epochs.get(tenant, 0), self.epochs.get(model, 0))

    def tenant_of(self, key: bytes) -> str:
        """The scope of the tenant of a key that is ticketed or published."""
        return next(scope for scope in self.scopes_of[key] if scope.startswith("tenant:"))

    def next_sequence(self) -> int:
        """A number above all earlier ones, also above those of an earlier life: it follows the clock's microseconds."""
        self.sequence = max(self.sequence + 1, int(self.now * 1e6))
        return self.sequence

    def sweep(self, now: float) -> None:
        """Remove what time has ended."""
        self.now = now
        for lease_id in [name for name, lease in self.leases.items() if lease.expires_at <= now]:
            self.end_lease(lease_id)
        for ticket_id in [name for name, ticket in self.tickets.items() if ticket.expires_at <= now]:
            self.end_ticket(ticket_id)
        self.room.forget_tenants(now)
        while self.by_age and self.is_over_age(self.by_age[0][0]):
            self.remove_entry(self.by_age[0][1])
        for worker_id in [name for name, worker in self.workers.items() if worker.expires_at <= now]:
            for key in list(self.workers[worker_id].held):
                self.remove_copy(key, worker_id)
            del self.workers[worker_id]

    def is_over_age(self, fence: int) -> bool:
        """Whether an entry has lived its time: its fence tells the microsecond at which its ticket was given."""
        seconds = self.limits.entry_ttl_seconds
        return seconds > 0 and fence <= (self.now - seconds) * 1e6

    def link(self, key: bytes, scope: str) -> None:
        """Let a key fall with a scope."""
        self.scopes_of[key].add(scope)
        self.keys_of_scope[scope].add(key)
        if scope in self.pinned and key in self.entries:
            self.room.set_busy(key)

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
        if entry.leases or (self.pinned and not self.pinned.isdisjoint(self.scopes_of[key])):
            self.room.set_busy(key)
        else:
            self.room.set_idle(key, entry.tenant, entry.score)

    def add_entry(self, key: bytes, entry: Entry) -> None:
        """Publish a key whose scopes are linked."""
        self.entries[key] = entry
        self.by_age.add((entry.fence, key))
        self.use(key)

    def use(self, key: bytes) -> None:
        """Count a use of an entry."""
        entry = self.entries[key]
        entry.uses += 1
        entry.score = greedy_dual_size_frequency(
            Use(entry.uses, entry.num_tokens, entry.size_bytes, self.now, self.room.clock)
        )
        self.settle(key)

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
        self.epochs[scope] = epoch
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

    def evict(self, victims: Iterable[Candidate]) -> None:
        """Remove entries for room."""
        for victim in victims:
            self.room.clock = max(self.room.clock, victim.score)
            self.remove_entry(victim.key)

    def snapshot(self) -> Snapshot:
        """A copy of everything, for integrity checks."""
        return Snapshot(
            budget_bytes=self.limits.budget_bytes,
            used_bytes=self.room.used_bytes,
            sequence=self.sequence,
            entries={
                key: EntryState(
                    entry.size_bytes, entry.tenant, entry.fence, frozenset(entry.tiers), frozenset(entry.leases)
                )
                for key, entry in self.entries.items()
            },
            tickets={
                name: TicketState(ticket.key, ticket.fence, ticket.lease_id, ticket.dead)
                for name, ticket in self.tickets.items()
            },
            ticket_of=dict(self.ticket_of),
            leases={
                name: LeaseState(frozenset(lease.keys), frozenset(lease.ticket_ids))
                for name, lease in self.leases.items()
            },
            idle=self.room.idle_keys(),
            pinned=frozenset(self.pinned),
            ages={key: fence for fence, key in self.by_age},
            held={name: frozenset(worker.held) for name, worker in self.workers.items()},
            marked={name: frozenset(worker.marked) for name, worker in self.workers.items()},
            scopes_of={key: frozenset(scopes) for key, scopes in self.scopes_of.items()},
            keys_of_scope={scope: frozenset(keys) for scope, keys in self.keys_of_scope.items()},
            tenant_bytes=dict(self.room.bytes_of),
            tenant_budgets={tenant: self.room.budget_of(tenant) for tenant in self.room.bytes_of},
            records=self.documents.snapshot(),
            records_of={scope: frozenset(found) for scope, found in self.documents.documents_of.items()},
        )
