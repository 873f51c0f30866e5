"""How the in-memory directory takes entries back from opened receipts; `lua/restore.lua` does the same in Redis."""

from collections.abc import Sequence

from services.cache.adapters.memory_state import Entry, Tables
from services.cache.domain.changes import Invalidated
from services.cache.domain.orders import Claim
from services.cache.domain.values import EntryRecord

__all__ = ["restore"]


def restore(tables: Tables, life: str, worker_id: str, claims: Sequence[Claim]) -> tuple[bytes, ...]:
    """See `Directory.restore`; `life` is the directory's own."""
    known = [claim for claim in claims if claim.record.life == life]
    for claim in known:
        record = claim.record
        tables.raise_sequence(max(record.fence, record.epochs.tenant, record.epochs.model))
        _adopt(tables, record.scopes.tenant, record.epochs.tenant)
        _adopt(tables, record.scopes.model, record.epochs.model)
    restored = {claim.record.key for claim in known if _restore_one(tables, worker_id, claim)}
    return tuple(claim.record.key for claim in claims if claim.record.key not in restored)


def _adopt(tables: Tables, scope: str, epoch: int) -> None:
    if epoch > tables.past.epoch_of(scope):
        tables.remove_scope(scope, epoch)
        tables.past.trim()
        tables.changes.append(Invalidated(scope, epoch))


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
    for scope in (record.scopes.tenant, record.scopes.model, *_documents(tables, record)):
        tables.link(record.key, scope)
    if not entry:
        tenant = record.scopes.tenant
        restored = Entry(record.kind, tenant, record.num_tokens, record.size_bytes, record.fence, record.ticket_id)
        tables.add_entry(record.key, restored)
    tables.add_copy(record.key, worker_id, claim.tier)
    return True


def _is_stale(tables: Tables, record: EntryRecord) -> bool:
    if tables.is_over_age(record.fence) or record.fence <= tables.past.floor:
        return True
    return record.epochs != tables.current_epochs(record.scopes.tenant, record.scopes.model) or any(
        max(tables.past.epoch_of(document), tables.documents.version(document)) > record.fence
        for document in _documents(tables, record)
    )


def _documents(tables: Tables, record: EntryRecord) -> frozenset[str]:
    """What a copy falls with, beside its tenant and model."""
    return record.scopes.documents | tables.past.links.get(record.key, {}).keys()
