"""The tables of the in-memory directory, and the small steps that keep them in agreement.

`lua/prelude.lua` holds the same steps for Redis, under the same names.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.cache.adapters.memory_documents import DocumentTable
from services.cache.domain.eviction import Candidate, choose_victims
from services.cache.domain.integrity import EntryState, LeaseState, Snapshot, TicketState
from services.cache.domain.values import EntryKind, Epochs, Limits, Removal, RemovedCopy

__all__ = ["Entry", "Lease", "OwnedTicket", "Tables", "Worker"]


@dataclass(slots=True)
class Entry:
    """A published key. `tiers`: the tier of each holder's copy."""

    kind: EntryKind
    tenant: str
    num_tokens: int
    size_bytes: int
    fence: int
    ticket_id: str
    used_at: float
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

    address: str
    expires_at: float
    held: dict[bytes, float] = field(default_factory=dict)
    marked: dict[bytes, float] = field(default_factory=dict)


@dataclass(slots=True)
class Tables:
    """All state. Every method leaves the indexes in agreement."""

    limits: Limits
    now: float = 0.0
    sequence: int = 0
    used_bytes: int = 0
    tenant_bytes: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    budgets: dict[str, int] = field(default_factory=dict)
    documents: DocumentTable = field(default_factory=DocumentTable)
    entries: dict[bytes, Entry] = field(default_factory=dict)
    tickets: dict[str, OwnedTicket] = field(default_factory=dict)
    ticket_of: dict[bytes, str] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    scopes_of: defaultdict[bytes, set[str]] = field(default_factory=lambda: defaultdict(set))
    keys_of_scope: defaultdict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))

    def current_epochs(self, tenant: str, model: str) -> Epochs:
        """Epochs of two scopes."""
        return Epochs(self.epochs.get(tenant, 0), self.epochs.get(model, 0))

    def tenant_of(self, key: bytes) -> str:
        """The scope of the tenant of a key that is ticketed or published."""
        return next(scope for scope in self.scopes_of[key] if scope.startswith("tenant:"))

    def budget_of(self, tenant: str) -> int:
        """Bytes that copies of a tenant may hold."""
        own = self.budgets.get(tenant) or self.limits.namespace_budget_bytes
        return min(own or self.limits.budget_bytes, self.limits.budget_bytes)

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
        for worker_id in [name for name, worker in self.workers.items() if worker.expires_at <= now]:
            for key in list(self.workers[worker_id].held):
                self.remove_copy(key, worker_id)
            del self.workers[worker_id]

    def link(self, key: bytes, scope: str) -> None:
        """Let a key fall with a scope."""
        self.scopes_of[key].add(scope)
        self.keys_of_scope[scope].add(key)

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

    def end_lease(self, lease_id: str) -> None:
        """Remove a lease; its tickets stay."""
        for key in self.leases.pop(lease_id).keys:
            self.entries[key].leases.discard(lease_id)

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
        self.used_bytes += entry.size_bytes
        self.tenant_bytes[entry.tenant] += entry.size_bytes

    def remove_copy(self, key: bytes, worker_id: str) -> None:
        """Forget a holder, and the entry with its last one."""
        entry = self.entries[key]
        del entry.tiers[worker_id]
        del self.workers[worker_id].held[key]
        self.used_bytes -= entry.size_bytes
        self.tenant_bytes[entry.tenant] -= entry.size_bytes
        if not self.tenant_bytes[entry.tenant]:
            del self.tenant_bytes[entry.tenant]
        if not entry.tiers:
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

    def victims(self, tenant: str, size_bytes: int, spared: bytes) -> tuple[bytes, ...] | None:
        """What to evict before `size_bytes` of a tenant fit, first for its own budget; None when they cannot."""
        if self.has_room(tenant, size_bytes):
            return ()
        idle = [
            (entry.tenant, Candidate(key, entry.size_bytes * len(entry.tiers), entry.used_at))
            for key, entry in self.entries.items()
            if not entry.leases and key != spared
        ]
        own = [candidate for owner, candidate in idle if owner == tenant]
        first = choose_victims(own, self.tenant_bytes.get(tenant, 0) + size_bytes - self.budget_of(tenant))
        if first is None:
            return None
        chosen = set(first)
        freed = sum(candidate.held_bytes for candidate in own if candidate.key in chosen)
        others = [candidate for _, candidate in idle if candidate.key not in chosen]
        second = choose_victims(others, self.used_bytes + size_bytes - freed - self.limits.budget_bytes)
        return None if second is None else first + second

    def excess(self, tenant: str) -> tuple[bytes, ...]:
        """What to evict so that the budgets are kept; all that is idle where that does not do."""
        found = self.victims(tenant, 0, b"")
        if found is not None:
            return found
        return tuple(key for key, entry in self.entries.items() if entry.tenant == tenant and not entry.leases)

    def has_room(self, tenant: str, size_bytes: int) -> bool:
        """Whether `size_bytes` of a tenant fit without evicting."""
        own = self.tenant_bytes.get(tenant, 0) + size_bytes <= self.budget_of(tenant)
        return own and self.used_bytes + size_bytes <= self.limits.budget_bytes

    def evict(self, keys: Sequence[bytes]) -> None:
        """Remove entries for room."""
        for key in keys:
            self.remove_entry(key)

    def snapshot(self) -> Snapshot:
        """A copy of everything, for integrity checks."""
        return Snapshot(
            budget_bytes=self.limits.budget_bytes,
            used_bytes=self.used_bytes,
            sequence=self.sequence,
            entries={
                key: EntryState(entry.size_bytes, entry.tenant, frozenset(entry.tiers), frozenset(entry.leases))
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
            idle={
                tenant: frozenset(
                    key for key, entry in self.entries.items() if entry.tenant == tenant and not entry.leases
                )
                for tenant in self.tenant_bytes
            },
            held={name: frozenset(worker.held) for name, worker in self.workers.items()},
            marked={name: frozenset(worker.marked) for name, worker in self.workers.items()},
            scopes_of={key: frozenset(scopes) for key, scopes in self.scopes_of.items()},
            keys_of_scope={scope: frozenset(keys) for scope, keys in self.keys_of_scope.items()},
            tenant_bytes=dict(self.tenant_bytes),
            tenant_budgets={tenant: self.budget_of(tenant) for tenant in self.tenant_bytes},
            records=self.documents.snapshot(),
            records_of={scope: frozenset(found) for scope, found in self.documents.documents_of.items()},
        )
