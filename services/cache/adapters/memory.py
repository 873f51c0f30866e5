"""The directory in this process's memory: the embedded default. Lost with the process; heartbeats rebuild it.

Epochs are lost too, except those that a receipt teaches. An invalidation that is followed by a restart before the
holders' next heartbeat can therefore be forgotten; deployments that depend on it use the Redis directory.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from services.cache.adapters.memory_restore import restore
from services.cache.adapters.memory_state import Entry, Lease, OwnedTicket, Tables, Worker
from services.cache.domain.admission import is_admitted
from services.cache.domain.directory import (
    Claim,
    Copy,
    Directory,
    HeartbeatReply,
    PlannedEntry,
    PlanOrder,
    PlanReply,
    PublishOrder,
    PublishReply,
    RegisterOrder,
    RegisterReply,
    Ticket,
    Usage,
    Wanted,
)
from services.cache.domain.errors import StaleEpochsError, UnknownLeaseError, UnknownWorkerError
from services.cache.domain.integrity import require_integrity
from services.cache.domain.values import (
    DocumentRecord,
    EntryRecord,
    Holder,
    Limits,
    PlanOutcome,
    PublishOutcome,
    RegisterOutcome,
    Removal,
    Scopes,
    StoredState,
)
from services.cache.domain.workers import WorkerRecord

__all__ = ["MemoryDirectory"]


class MemoryDirectory(Directory):
    """Atomic because no method awaits; `clock` gives seconds since the Unix epoch."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        self._limits = limits
        self._clock = clock
        self._tables = Tables(limits)

    @override
    async def epochs(self, scopes: Sequence[str]) -> Mapping[str, int]:
        return {scope: self._tables.epochs.get(scope, 0) for scope in scopes}

    @override
    async def plan(self, order: PlanOrder) -> PlanReply:
        tables = self._swept()
        current = {scope: tables.epochs.get(scope, 0) for scope in order.epochs}
        if current != order.epochs:
            raise StaleEpochsError(current)
        if order.extends and order.lease_id not in tables.leases:
            raise UnknownLeaseError(order.lease_id)
        lease = tables.leases.setdefault(order.lease_id, Lease(0.0))
        lease.expires_at = max(lease.expires_at, tables.now + order.lease_seconds)
        if order.budget_bytes:
            tables.room.budgets[order.tenant] = order.budget_bytes
        tables.room.see_tenant(order.tenant, tables.now)
        sighted: dict[bytes, int] = {}
        return PlanReply(order.lease_id, tuple(self._plan_one(order, wanted, sighted) for wanted in order.wanted))

    def _plan_one(self, order: PlanOrder, wanted: Wanted, sighted: dict[bytes, int]) -> PlannedEntry:
        """`sighted`: sightings of the absent keys that this order has counted."""
        tables = self._tables
        if any(tables.documents.is_superseded(each) for each in wanted.documents):
            return PlannedEntry(PlanOutcome.SUPERSEDED, wanted.key)
        if wanted.key not in tables.entries and wanted.public_key in tables.entries:
            return self._hit(order, wanted.public_key)
        if wanted.key not in tables.entries and wanted.key not in tables.ticket_of:
            if not self._admits(order, wanted, sighted):
                return PlannedEntry(PlanOutcome.LIVE, wanted.key)
            self._give_ticket(order, wanted)
            for scope in (order.tenant, order.model):
                tables.link(wanted.key, scope)
        for document in wanted.documents:
            for scope in (document.scope, *tables.documents.tags(document.scope)):
                tables.link(wanted.key, scope)
        return self._hit(order, wanted.key) if wanted.key in tables.entries else self._ticketed(order, wanted.key)

    def _admits(self, order: PlanOrder, wanted: Wanted, sighted: dict[bytes, int]) -> bool:
        if order.admit_all or self._limits.min_uses <= 1:
            return True
        if wanted.key not in sighted:
            sighted[wanted.key] = self._tables.room.sight(wanted.key)
        return is_admitted(wanted.kind, sighted[wanted.key], self._limits.min_uses)

    def _hit(self, order: PlanOrder, key: bytes) -> PlannedEntry:
        entry = self._tables.entries[key]
        if order.lease_id not in entry.leases:
            self._tables.lease_entry(order.lease_id, key)
            self._tables.use(key)
        return PlannedEntry(PlanOutcome.HIT, key, self._holders(entry))

    def _ticketed(self, order: PlanOrder, key: bytes) -> PlannedEntry:
        tables = self._tables
        ticket_id = tables.ticket_of[key]
        ticket = tables.tickets[ticket_id]
        remaining = ticket.expires_at - tables.now
        if ticket.lease_id == order.lease_id:
            return PlannedEntry(PlanOutcome.COLD, key, ticket=Ticket(ticket_id, ticket.fence, remaining))
        return PlannedEntry(PlanOutcome.PENDING, key, owner_expires_in_seconds=remaining)

    def _give_ticket(self, order: PlanOrder, wanted: Wanted) -> None:
        tables = self._tables
        fence = tables.next_sequence()
        lease = tables.leases[order.lease_id]
        expires_at = max(lease.expires_at, tables.now + self._limits.ticket_seconds)
        ticket_id = f"{order.nonce}-{fence}"
        tables.tickets[ticket_id] = OwnedTicket(
            wanted.key, wanted.kind, wanted.num_tokens, fence, order.lease_id, expires_at
        )
        tables.ticket_of[wanted.key] = ticket_id
        lease.ticket_ids.add(ticket_id)

    def _holders(self, entry: Entry) -> tuple[Holder, ...]:
        workers = self._tables.workers
        return tuple(Holder(name, workers[name].record.address, tier) for name, tier in sorted(entry.tiers.items()))

    @override
    async def renew(self, lease_id: str, lease_seconds: float) -> None:
        tables = self._swept()
        lease = tables.leases.get(lease_id)
        if not lease:
            raise UnknownLeaseError(lease_id)
        lease.expires_at = max(lease.expires_at, tables.now + lease_seconds)
        for ticket_id in lease.ticket_ids:
            ticket = tables.tickets[ticket_id]
            ticket.expires_at = max(ticket.expires_at, lease.expires_at)

    @override
    async def release(self, lease_id: str) -> None:
        tables = self._swept()
        lease = tables.leases.get(lease_id)
        if lease:
            for ticket_id in list(lease.ticket_ids):
                tables.end_ticket(ticket_id)
            tables.end_lease(lease_id)

    @override
    async def publish(self, order: PublishOrder) -> PublishReply:
        tables = self._swept()
        ticket = tables.tickets.get(order.ticket_id)
        entry = tables.entries.get(order.key)
        again = entry is not None and (entry.ticket_id, entry.fence) == (order.ticket_id, order.fence)
        if not again:
            if not ticket or (ticket.key, ticket.fence) != (order.key, order.fence):
                return PublishReply(PublishOutcome.FENCED)
            if ticket.dead:
                return PublishReply(PublishOutcome.INVALIDATED)
        if order.worker_id not in tables.workers:
            raise UnknownWorkerError(order.worker_id)
        if entry and order.worker_id in entry.tiers:
            return PublishReply(PublishOutcome.ACCEPTED, record=self._record(order.key))
        size_bytes = entry.size_bytes if entry else order.size_bytes
        victims = tables.victims(tables.tenant_of(order.key), size_bytes, order.key)
        if victims is None:
            if not entry:
                tables.end_ticket(order.ticket_id)
            return PublishReply(PublishOutcome.OVER_BUDGET)
        drop_keys = tuple(one.key for one in victims if order.worker_id in tables.entries[one.key].tiers)
        tables.evict(victims)
        if not entry:
            self._accept(order)
        tables.add_copy(order.key, order.worker_id, order.tier)
        return PublishReply(PublishOutcome.ACCEPTED, drop_keys, len(victims), self._record(order.key))

    def _accept(self, order: PublishOrder) -> None:
        tables = self._tables
        del tables.ticket_of[order.key]
        ticket = tables.forget_ticket(order.ticket_id)
        tenant = tables.tenant_of(order.key)
        entry = Entry(ticket.kind, tenant, ticket.num_tokens, order.size_bytes, ticket.fence, order.ticket_id)
        tables.add_entry(order.key, entry)
        if ticket.lease_id in tables.leases:
            tables.lease_entry(ticket.lease_id, order.key)

    def _record(self, key: bytes) -> EntryRecord:
        entry, names = self._tables.entries[key], self._tables.scopes_of[key]
        tenant = entry.tenant
        model = next(name for name in names if name.startswith("model:"))
        return EntryRecord(
            key=key,
            kind=entry.kind,
            num_tokens=entry.num_tokens,
            size_bytes=entry.size_bytes,
            fence=entry.fence,
            ticket_id=entry.ticket_id,
            scopes=Scopes(tenant, model, frozenset(names - {tenant, model})),
            epochs=self._tables.current_epochs(tenant, model),
        )

    @override
    async def invalidate(self, scope: str) -> Removal:
        tables = self._swept()
        tables.pinned.discard(scope)
        return tables.remove_scope(scope, tables.next_sequence())

    @override
    async def pin(self, scope: str) -> int:
        self._swept().pinned.add(scope)
        return self._settle_scope(scope)

    @override
    async def unpin(self, scope: str) -> int:
        self._swept().pinned.discard(scope)
        return self._settle_scope(scope)

    def _settle_scope(self, scope: str) -> int:
        tables = self._tables
        published = [key for key in tables.keys_of_scope.get(scope, ()) if key in tables.entries]
        for key in published:
            tables.settle(key)
        return len(published)

    @override
    async def register(self, order: RegisterOrder) -> RegisterReply:
        tables = self._swept()
        known = tables.documents.find(order.scope)
        if known and replace(order.record, version=known.version, num_tokens=known.num_tokens) == known:
            return RegisterReply(RegisterOutcome.UNCHANGED, known.version, Removal())
        version = tables.next_sequence()
        removal = tables.remove_scope(order.scope, version)
        tables.documents.put(replace(order, record=replace(order.record, version=version)))
        return RegisterReply(RegisterOutcome.REPLACED if known else RegisterOutcome.CREATED, version, removal)

    @override
    async def find_document(self, scope: str) -> DocumentRecord | None:
        return self._tables.documents.find(scope)

    @override
    async def list_documents(self, tenant: str, after: str, limit: int) -> tuple[DocumentRecord, ...]:
        return self._tables.documents.page(tenant, after, limit)

    @override
    async def states(self, scope: str) -> tuple[StoredState, ...]:
        tables = self._swept()
        keys = sorted(key for key in tables.keys_of_scope.get(scope, ()) if key in tables.entries)
        found = ((key, tables.entries[key]) for key in keys)
        return tuple(
            StoredState(key, entry.kind, entry.num_tokens, entry.size_bytes, self._holders(entry))
            for key, entry in found
        )

    @override
    async def reconcile(self) -> int:
        tables = self._swept()
        num_before = len(tables.entries)
        for tenant in sorted(tables.room.bytes_of):
            tables.evict(tables.excess(tenant))
        return num_before - len(tables.entries)

    @override
    async def heartbeat(self, worker: WorkerRecord, copies: Sequence[Copy]) -> HeartbeatReply:
        tables, worker_id = self._swept(), worker.worker_id
        known = tables.workers.setdefault(worker_id, Worker(worker, 0.0))
        known.record, known.expires_at = worker, tables.now + self._limits.worker_ttl_seconds
        for copy in copies:
            if copy.key in known.held:
                tables.entries[copy.key].tiers[worker_id] = copy.tier
        listed = {copy.key: None for copy in copies}
        settled = tables.now - self._limits.settle_seconds
        for key in [key for key, since in known.held.items() if key not in listed and since <= settled]:
            tables.remove_copy(key, worker_id)
        for key in [key for key, since in known.marked.items() if key not in listed and since <= settled]:
            del known.marked[key]
        return HeartbeatReply(
            drop_keys=tuple(key for key in listed if key in known.marked),
            unknown_keys=tuple(key for key in listed if key not in known.marked and key not in known.held),
        )

    @override
    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        return tuple(worker.record for _, worker in sorted(self._swept().workers.items()))

    @override
    async def restore(self, worker_id: str, claims: Sequence[Claim]) -> tuple[bytes, ...]:
        return restore(self._swept(), worker_id, claims)

    @override
    async def usage(self) -> Usage:
        tables = self._swept()
        return Usage(
            num_entries=len(tables.entries),
            used_bytes=tables.room.used_bytes,
            num_leases=len(tables.leases),
            num_tickets=len(tables.ticket_of),
            num_workers=len(tables.workers),
        )

    @override
    async def check_integrity(self) -> None:
        require_integrity(self._tables.snapshot())

    @override
    async def close(self) -> None:
        """Nothing to give up."""

    def _swept(self) -> Tables:
        self._tables.sweep(self._clock())
        return self._tables
