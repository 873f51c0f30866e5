"""How the in-memory directory takes entries back from opened receipts; `lua/restore.lua` does the same in Redis."""

from collections.abc import Sequence

from services.cache.adapters.memory_state import Entry, Tables
from services.cache.domain.directory import Claim
from services.cache.domain.values import EntryRecord

__all__ = ["restore"]


def restore(tables: Tables, worker_id: str, claims: Sequence[Claim]) -> tuple[bytes, ...]:
    """See `Directory.restore`."""
    for claim in claims:
        record = claim.record
        tables.sequence = max(tables.sequence, record.fence, record.epochs.tenant, record.epochs.model)
        for scope, epoch in (
            (record.scopes.tenant, record.epochs.tenant),
            (record.scopes.model, record.epochs.model),
        ):
            if epoch > tables.epochs.get(scope, 0):
                tables.remove_scope(scope, epoch)
    return tuple(claim.record.key for claim in claims if not _restore_one(tables, worker_id, claim))


def _restore_one(tables: Tables, worker_id: str, claim: Claim) -> bool:
    record = claim.record
    worker, entry = tables.workers.get(worker_id), tables.entries.get(record.key)
    if not worker or record.key in worker.marked or _is_stale(tables, record):
        return False
    if entry and (entry.fence, entry.ticket_id) != (record.fence, record.ticket_id):
        return False
    if entry and worker_id in entry.tiers:
        return True
    if not tables.room.fits(record.scopes.tenant, record.size_bytes):
        return False
    if record.key in tables.ticket_of:
        # The key stays occupied, so it goes on falling with the documents of the plans that waited for it.
        tables.forget_ticket(tables.ticket_of.pop(record.key))
    for scope in (record.scopes.tenant, record.scopes.model, *record.scopes.documents):
        tables.link(record.key, scope)
    if not entry:
        tenant = record.scopes.tenant
        restored = Entry(record.kind, tenant, record.num_tokens, record.size_bytes, record.fence, record.ticket_id)
        tables.add_entry(record.key, restored)
    tables.add_copy(record.key, worker_id, claim.tier)
    return True


def _is_stale(tables: Tables, record: EntryRecord) -> bool:
    if tables.is_over_age(record.fence):
        return True
    return record.epochs != tables.current_epochs(record.scopes.tenant, record.scopes.model) or any(
        tables.epochs.get(document, 0) > record.fence for document in record.scopes.documents
    )
