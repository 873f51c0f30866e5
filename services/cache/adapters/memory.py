"""The directory in this process's memory: the embedded default.

Entries are lost with the process; heartbeats rebuild them. What must not be forgotten is written to a journal before a
call returns: a copy that comes back with a heartbeat is believed only where the journal reaches back to its publish.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from services.cache.adapters.memory_changes import apply, everything
from services.cache.adapters.memory_pins import promised_bytes
from services.cache.adapters.memory_plan import holders_of, plan
from services.cache.adapters.memory_publish import publish
from services.cache.adapters.memory_restore import restore
from services.cache.adapters.memory_snapshot import read_snapshot
from services.cache.adapters.memory_state import Tables, Worker
from services.cache.domain.changes import (
    Change,
    ForgetfulJournal,
    Invalidated,
    Journal,
    Pinned,
    Registered,
    Unpinned,
)
from services.cache.domain.directory import Directory
from services.cache.domain.errors import PinLimitError, UnknownLeaseError
from services.cache.domain.evictions import Eviction, EvictionReason
from services.cache.domain.integrity import require_integrity
from services.cache.domain.orders import (
    Claim,
    Copy,
    HeartbeatReply,
    PinReply,
    PlanOrder,
    PlanReply,
    PublishOrder,
    PublishReply,
    RegisterOrder,
    RegisterReply,
    Usage,
)
from services.cache.domain.values import (
    DocumentRecord,
    Limits,
    RegisterOutcome,
    Removal,
    StoredState,
)
from services.cache.domain.workers import WorkerRecord

__all__ = ["MemoryDirectory"]


class MemoryDirectory(Directory):
    """Atomic because no method awaits before its changes are made; `clock` gives seconds since the Unix epoch.

    Without a journal nothing outlives the process, and nothing is taken back that an earlier one published.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.time, journal: Journal | None = None) -> None:
        self._limits = limits
        self._clock = clock
        self._tables = Tables(limits)
        self._journal = journal or ForgetfulJournal(secrets.token_hex(8))
        for change in self._journal.recall():
            apply(self._tables, change)

    @override
    async def epochs(self, scopes: Sequence[str]) -> Mapping[str, int]:
        return {scope: self._tables.past.epoch_of(scope) for scope in scopes}

    @override
    async def plan(self, order: PlanOrder) -> PlanReply:
        tables = self._swept()
        entries = plan(tables, order)
        if tables.changes:
            await self._keep()
        return PlanReply(order.lease_id, entries)

    @override
    async def renew(self, lease_id: str, lease_seconds: float) -> None:
        tables = self._swept()
        lease = tables.leases.get(lease_id)
        if not lease:
            raise UnknownLeaseError(lease_id)
        lease.expires_at = max(lease.expires_at, tables.expires_in(lease_seconds))
        for ticket_id in lease.ticket_ids:
            ticket = tables.tickets[ticket_id]
            ticket.expires_at = max(ticket.expires_at, lease.expires_at)

    @override
    async def release(self, *lease_ids: str) -> None:
        tables = self._swept()
        for lease_id in lease_ids:
            lease = tables.leases.get(lease_id)
            if lease:
                for ticket_id in list(lease.ticket_ids):
                    tables.end_ticket(ticket_id)
                tables.end_lease(lease_id)

    @override
    async def publish(self, order: PublishOrder) -> PublishReply:
        return publish(self._swept(), self._journal.life, order)

    @override
    async def invalidate(self, scope: str) -> Removal:
        removal = self._make(Invalidated(scope, self._swept().next_sequence()))
        await self._keep()
        return removal

    @override
    async def pin(self, scope: str, budget_bytes: int = 0) -> PinReply:
        tables = self._swept()
        if budget_bytes:
            tables.room.budgets[scope] = budget_bytes
        promised = promised_bytes(tables, tables.pinned | {scope})
        if promised > self._limits.pin_limit_bytes and scope not in tables.pinned:
            raise PinLimitError(promised, self._limits.pin_limit_bytes)
        return await self._settle_scope(scope, Pinned(scope))

    @override
    async def unpin(self, scope: str) -> PinReply:
        self._swept()
        return await self._settle_scope(scope, Unpinned(scope))

    async def _settle_scope(self, scope: str, change: Pinned | Unpinned) -> PinReply:
        tables = self._tables
        self._make(change)
        published = [key for key in tables.keys_of_scope.get(scope, ()) if key in tables.entries]
        for key in published:
            tables.settle(key)
        reply = PinReply(len(published), promised_bytes(tables, tables.pinned), self._limits.pin_limit_bytes)
        await self._keep()
        return reply

    @override
    async def pinned(self, scopes: Sequence[str]) -> frozenset[str]:
        return frozenset(self._tables.pinned.intersection(scopes))

    @override
    async def register(self, order: RegisterOrder) -> RegisterReply:
        tables = self._swept()
        known = tables.documents.find(order.scope)
        if known and replace(order.record, version=known.version, num_tokens=known.num_tokens) == known:
            # An earlier call may have failed to write what it changed.
            await self._keep()
            return RegisterReply(RegisterOutcome.UNCHANGED, known.version, Removal())
        version = tables.next_sequence()
        removal = self._make(Registered(replace(order, record=replace(order.record, version=version))))
        await self._keep()
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
            StoredState(key, entry.kind, entry.num_tokens, entry.size_bytes, holders_of(tables, entry))
            for key, entry in found
        )

    @override
    async def reconcile(self) -> int:
        tables = self._swept()
        num_before = len(tables.entries)
        for tenant in sorted(tables.room.bytes_of):
            tables.evict(tables.excess(tenant), EvictionReason.LOWERED_BUDGET)
        return num_before - len(tables.entries)

    @override
    async def heartbeat(self, worker: WorkerRecord, copies: Sequence[Copy]) -> HeartbeatReply:
        tables, worker_id = self._swept(), worker.worker_id
        known = tables.workers.setdefault(worker_id, Worker(worker, 0.0))
        known.record, known.expires_at = worker, tables.expires_in(self._limits.worker_ttl_seconds)
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
        refused = restore(self._swept(), self._journal.life, worker_id, claims)
        await self._keep()
        return refused

    @override
    async def evictions(self) -> tuple[Eviction, ...]:
        return self._tables.evictions.rows()

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
        require_integrity(read_snapshot(self._tables))

    @override
    async def close(self) -> None:
        """Let go of the journal."""
        self._journal.close()

    def _make(self, change: Change) -> Removal:
        """Make a change that is to be kept."""
        removal = apply(self._tables, change)
        self._tables.changes.append(change)
        return removal

    async def _keep(self) -> None:
        """Return once the journal has all changes: nobody is told of one that a restart could undo."""
        made, self._tables.changes = self._tables.changes, []
        await self._journal.write(made, lambda: everything(self._tables))

    def _swept(self) -> Tables:
        self._tables.sweep(self._clock())
        return self._tables
