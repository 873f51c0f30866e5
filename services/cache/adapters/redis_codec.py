"""How the scripts of the Redis directory write what they are told and what they answer."""

import json
from collections.abc import Sequence

from services.cache.domain.admission import MAX_SIGHTINGS
from services.cache.domain.directory import Claim, PlannedEntry, PlanOrder, RegisterOrder, Ticket
from services.cache.domain.values import (
    DocumentRecord,
    EntryKind,
    EntryRecord,
    Epochs,
    Holder,
    PlanOutcome,
    RemovedCopy,
    Scopes,
    StoredState,
)
from services.cache.domain.workers import WorkerRecord

__all__ = [
    "described",
    "document",
    "keys",
    "plan_fields",
    "planned",
    "record",
    "register_fields",
    "removed_copies",
    "state",
    "worker",
    "worker_fields",
]


def plan_fields(order: PlanOrder) -> dict[str, object]:
    """The fields of a plan."""
    wanted = [
        {
            "key": one.key.hex(),
            "kind": one.kind,
            "tokens": one.num_tokens,
            "documents": [[ref.scope, ref.digest.hex()] for ref in one.documents],
            "public_key": one.public_key.hex() if one.public_key else None,
        }
        for one in order.wanted
    ]
    return {
        "lease": order.lease_id,
        "extends": order.extends,
        "nonce": order.nonce,
        "lease_seconds": order.lease_seconds,
        "tenant": order.tenant,
        "model": order.model,
        "epochs": dict(order.epochs),
        "budget_bytes": order.budget_bytes,
        "admit_all": order.admit_all,
        "max_sightings": MAX_SIGHTINGS,
        "wanted": wanted,
    }


def register_fields(order: RegisterOrder) -> dict[str, object]:
    """The fields of a registration; tags are kept as JSON, which the script compares."""
    record = order.record
    return {
        "tenant": order.tenant,
        "scope": order.scope,
        "tag_scopes": json.dumps(order.tags),
        "id": record.document_id,
        "title": record.title,
        "tags": json.dumps(record.tags),
        "digest": record.digest.hex(),
        "tokens": record.num_tokens,
    }


def planned(key: bytes, answer: Sequence[str]) -> PlannedEntry:
    """One entry of a plan."""
    outcome, *details = answer
    if outcome == PlanOutcome.HIT:
        return PlannedEntry(PlanOutcome.HIT, bytes.fromhex(details[0]), _holders(details[1:]))
    if outcome == PlanOutcome.COLD:
        ticket_id, fence, seconds = details
        return PlannedEntry(PlanOutcome.COLD, key, ticket=Ticket(ticket_id, int(fence), float(seconds)))
    if outcome in (PlanOutcome.SUPERSEDED, PlanOutcome.LIVE):
        return PlannedEntry(PlanOutcome(outcome), key)
    return PlannedEntry(PlanOutcome.PENDING, key, owner_expires_in_seconds=float(details[0]))


def _holders(details: Sequence[str]) -> tuple[Holder, ...]:
    triples = zip(details[::3], details[1::3], details[2::3], strict=True)
    return tuple(sorted((Holder(*one) for one in triples), key=lambda holder: holder.worker_id))


def state(answer: Sequence[str]) -> StoredState:
    """One published entry of a scope."""
    key, kind, num_tokens, size_bytes, *details = answer
    return StoredState(bytes.fromhex(key), EntryKind(kind), int(num_tokens), int(size_bytes), _holders(details))


def document(answer: Sequence[str]) -> DocumentRecord:
    """One registered document."""
    document_id, title, tags, digest, num_tokens, version = answer
    return DocumentRecord(
        document_id, title, tuple(json.loads(tags)), bytes.fromhex(digest), int(num_tokens), int(version)
    )


def removed_copies(answer: Sequence[str]) -> tuple[RemovedCopy, ...]:
    """Copies that left the index."""
    fields = zip(answer[::4], answer[1::4], answer[2::4], answer[3::4], strict=True)
    return tuple(RemovedCopy(bytes.fromhex(key), worker, tier, int(size)) for key, worker, tier, size in fields)


def record(key: bytes, fields: list[str], scopes: list[str], tenant_epoch: str, model_epoch: str) -> EntryRecord:
    """The description of a published entry."""
    kind, num_tokens, size_bytes, fence, ticket_id = fields
    tenant = next(scope for scope in scopes if scope.startswith("tenant:"))
    model = next(scope for scope in scopes if scope.startswith("model:"))
    return EntryRecord(
        key=key,
        kind=EntryKind(kind),
        num_tokens=int(num_tokens),
        size_bytes=int(size_bytes),
        fence=int(fence),
        ticket_id=ticket_id,
        scopes=Scopes(tenant, model, frozenset(scopes) - {tenant, model}),
        epochs=Epochs(int(tenant_epoch), int(model_epoch)),
    )


def described(claim: Claim) -> dict[str, object]:
    """A claim, with what its receipt says."""
    record = claim.record
    return {
        "key": record.key.hex(),
        "kind": record.kind,
        "tokens": record.num_tokens,
        "size": record.size_bytes,
        "fence": record.fence,
        "ticket": record.ticket_id,
        "tenant": record.scopes.tenant,
        "model": record.scopes.model,
        "documents": sorted(record.scopes.documents),
        "epochs": [record.epochs.tenant, record.epochs.model],
        "tier": claim.tier,
    }


def keys(answers: Sequence[str]) -> tuple[bytes, ...]:
    """Keys from their hexadecimal form."""
    return tuple(bytes.fromhex(answer) for answer in answers)


def worker_fields(record: WorkerRecord) -> dict[str, object]:
    """The fields of a heartbeat that say who it is."""
    return {"worker": record.worker_id, "address": record.address, "description": record.description.hex()}


def worker(worker_id: str, address: str, description: str) -> WorkerRecord:
    """A worker as `worker_fields` wrote it."""
    return WorkerRecord(worker_id, address, bytes.fromhex(description))
