"""Reads the whole in-memory directory, for integrity checks."""

from services.cache.adapters.memory_state import Tables
from services.cache.domain.integrity import EntryState, LeaseState, Snapshot, TicketState

__all__ = ["read_snapshot"]


def read_snapshot(tables: Tables) -> Snapshot:
    """A copy of everything."""
    return Snapshot(
        budget_bytes=tables.limits.budget_bytes,
        used_bytes=tables.room.used_bytes,
        sequence=tables.sequence,
        entries={
            key: EntryState(
                entry.size_bytes,
                entry.tenant,
                entry.fence,
                frozenset(entry.tiers),
                frozenset(entry.leases),
                len(entry.leases),
                entry.kind,
            )
            for key, entry in tables.entries.items()
        },
        tickets={
            name: TicketState(ticket.key, ticket.fence, ticket.lease_id, ticket.dead)
            for name, ticket in tables.tickets.items()
        },
        ticket_of=dict(tables.ticket_of),
        leases={
            name: LeaseState(frozenset(lease.keys), frozenset(lease.ticket_ids))
            for name, lease in tables.leases.items()
        },
        idle=tables.room.idle_keys(),
        pinned=frozenset(tables.pinned),
        ages={key: fence for fence, key in tables.by_age},
        held={name: frozenset(worker.held) for name, worker in tables.workers.items()},
        marked={name: frozenset(worker.marked) for name, worker in tables.workers.items()},
        scopes_of={key: frozenset(scopes) for key, scopes in tables.scopes_of.items()},
        keys_of_scope={scope: frozenset(keys) for scope, keys in tables.keys_of_scope.items()},
        tenant_bytes=dict(tables.room.bytes_of),
        tenant_budgets={tenant: tables.room.budget_of(tenant) for tenant in tables.room.bytes_of},
        epochs=dict(tables.past.epochs),
        links={key: frozenset(scopes) for key, scopes in tables.past.links.items()},
        past=tables.past.members(),
        records=tables.documents.snapshot(),
        records_of={scope: frozenset(found) for scope, found in tables.documents.documents_of.items()},
    )
