"""How the in-memory directory plans; `lua/plan.lua` does the same in Redis."""

from dataclasses import dataclass, field

from services.cache.adapters.memory_state import Entry, Lease, OwnedTicket, Tables
from services.cache.domain.admission import is_admitted
from services.cache.domain.errors import StaleEpochsError, UnknownLeaseError
from services.cache.domain.evictions import Miss
from services.cache.domain.orders import PlannedEntry, PlanOrder, Ticket, Wanted
from services.cache.domain.values import EntryKind, Holder, PlanOutcome

__all__ = ["holders_of", "plan"]


def plan(tables: Tables, order: PlanOrder) -> tuple[PlannedEntry, ...]:
    """See `Directory.plan`."""
    current = {scope: tables.past.epoch_of(scope) for scope in order.epochs}
    if current != order.epochs:
        raise StaleEpochsError(current)
    if order.extends and order.lease_id not in tables.leases:
        raise UnknownLeaseError(order.lease_id)
    lease = tables.leases.setdefault(order.lease_id, Lease(0.0))
    lease.expires_at = max(lease.expires_at, tables.expires_in(order.lease_seconds))
    if order.budget_bytes:
        tables.room.budgets[order.tenant] = order.budget_bytes
    tables.room.see_tenant(order.tenant, tables.now)
    planning = _Planning(tables, order, lease)
    return tuple([planning.plan_one(wanted) for wanted in order.wanted])


def holders_of(tables: Tables, entry: Entry) -> tuple[Holder, ...]:
    """Who holds an entry, by name."""
    workers = tables.workers
    return tuple([Holder(name, workers[name].record.address, tier) for name, tier in sorted(entry.tiers.items())])


@dataclass(slots=True)
class _Planning:
    """One order; `sighted`: sightings of the absent keys that it has counted; `missed`: keys whose absence it has told."""

    tables: Tables
    order: PlanOrder
    lease: Lease
    sighted: dict[bytes, int] = field(default_factory=dict)
    missed: set[bytes] = field(default_factory=set)

    def plan_one(self, wanted: Wanted) -> PlannedEntry:
        tables, key = self.tables, wanted.key
        if wanted.documents and any(map(tables.documents.is_superseded, wanted.documents)):
            return PlannedEntry(PlanOutcome.SUPERSEDED, key)
        is_resident = key in tables.entries
        if not is_resident and wanted.public_key in tables.entries:
            return self._hit(wanted.public_key)
        miss: Miss | None = None
        if not is_resident and key not in tables.ticket_of:
            miss = self._miss(wanted)
            if not self._admits(wanted):
                return PlannedEntry(PlanOutcome.LIVE, key, miss=miss)
            self._give_ticket(wanted)
            for scope in (self.order.tenant, self.order.model):
                tables.link(key, scope)
        for document in wanted.documents:
            for scope in (document.scope, *tables.documents.tags(document.scope)):
                tables.link(key, scope)
        return self._hit(key) if is_resident else self._ticketed(key, miss)

    def _miss(self, wanted: Wanted) -> Miss | None:
        if wanted.kind is not EntryKind.SEGMENT or wanted.key in self.missed:
            return None
        self.missed.add(wanted.key)
        return self.tables.evictions.miss_of(wanted.key)

    def _admits(self, wanted: Wanted) -> bool:
        limits = self.tables.limits
        if self.order.admit_all or limits.min_uses <= 1:
            return True
        if wanted.key not in self.sighted:
            self.sighted[wanted.key] = self.tables.room.sight(wanted.key)
        return is_admitted(wanted.kind, self.sighted[wanted.key], limits.min_uses)

    def _hit(self, key: bytes) -> PlannedEntry:
        entry = self.tables.entries[key]
        if self.order.lease_id not in entry.leases:
            self.tables.count_use(entry)
            self.tables.lease_entry(self.order.lease_id, key)
        return PlannedEntry(PlanOutcome.HIT, key, holders_of(self.tables, entry))

    def _ticketed(self, key: bytes, miss: Miss | None) -> PlannedEntry:
        tables = self.tables
        ticket_id = tables.ticket_of[key]
        ticket = tables.tickets[ticket_id]
        remaining = ticket.expires_at - tables.now
        if ticket.lease_id == self.order.lease_id:
            return PlannedEntry(PlanOutcome.COLD, key, ticket=Ticket(ticket_id, ticket.fence, remaining), miss=miss)
        return PlannedEntry(PlanOutcome.PENDING, key, owner_expires_in_seconds=remaining)

    def _give_ticket(self, wanted: Wanted) -> None:
        tables, lease_id = self.tables, self.order.lease_id
        fence = tables.next_sequence()
        expires_at = max(self.lease.expires_at, tables.expires_in(tables.limits.ticket_seconds))
        ticket_id = f"{self.order.nonce}-{fence}"
        tables.tickets[ticket_id] = OwnedTicket(wanted.key, wanted.kind, wanted.num_tokens, fence, lease_id, expires_at)
        tables.ticket_of[wanted.key] = ticket_id
        self.lease.ticket_ids.add(ticket_id)
