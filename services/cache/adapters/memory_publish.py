"""How the in-memory directory turns a ticket into an entry; `lua/publish.lua` does the same in Redis."""

from services.cache.adapters.memory_state import Entry, Tables
from services.cache.domain.errors import UnknownWorkerError
from services.cache.domain.orders import PublishOrder, PublishReply
from services.cache.domain.values import EntryRecord, PublishOutcome, Scopes

__all__ = ["publish"]


def publish(tables: Tables, life: str, order: PublishOrder) -> PublishReply:
    """See `Directory.publish`; `life` is the directory's own."""
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
        return PublishReply(PublishOutcome.ACCEPTED, record=_record(tables, life, order.key))
    size_bytes = entry.size_bytes if entry else order.size_bytes
    tenant = tables.tenant_of(order.key)
    victims = tables.victims(tenant, size_bytes, order.key)
    if victims is None:
        if not entry:
            tables.end_ticket(order.ticket_id)
        return PublishReply(PublishOutcome.OVER_BUDGET)
    drop_keys = tuple(one.key for one in victims if order.worker_id in tables.entries[one.key].tiers)
    num_own = tables.evict_for(tenant, victims, tables.room.own_excess(tenant, size_bytes))
    if not entry:
        _accept(tables, order)
    tables.add_copy(order.key, order.worker_id, order.tier)
    record = _record(tables, life, order.key)
    return PublishReply(PublishOutcome.ACCEPTED, drop_keys, len(victims), num_own, record)


def _accept(tables: Tables, order: PublishOrder) -> None:
    del tables.ticket_of[order.key]
    ticket = tables.forget_ticket(order.ticket_id)
    tenant = tables.tenant_of(order.key)
    entry = Entry(ticket.kind, tenant, ticket.num_tokens, order.size_bytes, ticket.fence, order.ticket_id)
    tables.add_entry(order.key, entry)
    if ticket.lease_id in tables.leases:
        tables.lease_entry(ticket.lease_id, order.key)


def _record(tables: Tables, life: str, key: bytes) -> EntryRecord:
    entry, names = tables.entries[key], tables.scopes_of[key]
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
        epochs=tables.current_epochs(tenant, model),
        life=life,
    )
