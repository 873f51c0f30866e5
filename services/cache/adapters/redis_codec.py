"""How the scripts of the Redis directory write what they are told and what they answer."""

import json
from collections.abc import Sequence

from services.cache.domain.admission import MAX_SIGHTINGS
from services.cache.domain.descriptions import described, record_of
from services.cache.domain.evictions import Eviction, Miss, MissCause
from services.cache.domain.orders import Claim, PlannedEntry, PlanOrder, RegisterOrder, Ticket, Wanted
from services.cache.domain.values import (
    KEY_BYTES,
    DocumentRecord,
    EntryKind,
    EntryRecord,
    Holder,
    PlanOutcome,
    RemovedCopy,
    StoredState,
)
from services.cache.domain.workers import WorkerRecord

__all__ = [
    "claimed",
    "document",
    "evictions",
    "keys",
    "pairs",
    "plan_fields",
    "plan_keys",
    "planned",
    "record",
    "register_fields",
    "removed_copies",
    "state",
    "worker",
    "worker_fields",
]


def plan_fields(order: PlanOrder) -> dict[str, object]:
    """The fields of a plan; `plan_keys` go with them."""
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
        "wanted": [
            (one.kind, one.num_tokens, [(ref.scope, ref.digest.hex()) for ref in one.documents]) for one in order.wanted
        ],
    }


def plan_keys(order: PlanOrder) -> tuple[str, str]:
    """The keys of all parts, and their public ones; no key is all zeros."""
    keys = b"".join([one.key for one in order.wanted])
    public_keys = b"".join([one.public_key or bytes(KEY_BYTES) for one in order.wanted])
    return keys.hex(), public_keys.hex()


def register_fields(order: RegisterOrder) -> dict[str, object]:
    """The fields of a registration; tags are kept as JSON, which the script compares."""
    record = order.record
    return {
        "tenant": order.tenant,
        "scope": order.scope,
        "tag_scopes": order.tags,
        "id": record.document_id,
        "title": record.title,
        "tags": json.dumps(record.tags),
        "digest": record.digest.hex(),
        "tokens": record.num_tokens,
    }


def planned(
    order: PlanOrder,
    holders: Sequence[Sequence[str]],
    workers: Sequence[str],
    addresses: Sequence[str],
    *answers: int | Sequence[str],
) -> tuple[PlannedEntry, ...]:
    """The entries of a plan; see `lua/plan.lua`."""
    address_of = dict(zip(workers, addresses, strict=True))
    held = [
        tuple([Holder(worker, address_of[worker], tier) for worker, tier in sorted(pairs(one).items())])
        for one in holders
    ]
    return tuple([_planned(one, answer, held) for one, answer in zip(order.wanted, answers, strict=True)])


def _planned(wanted: Wanted, answer: int | Sequence[str], held: Sequence[tuple[Holder, ...]]) -> PlannedEntry:
    if isinstance(answer, int):
        key = wanted.key if answer > 0 else wanted.public_key or b""
        return PlannedEntry(PlanOutcome.HIT, key, held[abs(answer) - 1])
    outcome = PlanOutcome(answer[0])
    if outcome is PlanOutcome.COLD:
        _, ticket_id, fence, seconds, *miss = answer
        ticket = Ticket(ticket_id, int(fence), float(seconds))
        return PlannedEntry(outcome, wanted.key, ticket=ticket, miss=_miss(miss))
    if outcome is PlanOutcome.PENDING:
        return PlannedEntry(outcome, wanted.key, owner_expires_in_seconds=float(answer[1]))
    return PlannedEntry(outcome, wanted.key, miss=_miss(answer[1:]))


def _miss(answer: Sequence[str]) -> Miss | None:
    return Miss(MissCause(answer[0]), int(answer[1])) if answer else None


def evictions(answer: Sequence[Sequence[str]]) -> tuple[Eviction, ...]:
    """Who evicted whom, most entries first."""
    rows = [Eviction(one[0], one[1], *map(int, one[2:])) for one in answer]
    return tuple(sorted(rows, key=lambda row: (-row.num_entries, row.evictor, row.victim)))


def pairs(answer: Sequence[str]) -> dict[str, str]:
    """What a script answers for a table: a name, its value, and so on."""
    return dict(zip(answer[::2], answer[1::2], strict=True))


def state(answer: Sequence[str]) -> StoredState:
    """One published entry of a scope."""
    key, kind, num_tokens, size_bytes, *details = answer
    triples = zip(details[::3], details[1::3], details[2::3], strict=True)
    holders = tuple(sorted((Holder(*one) for one in triples), key=lambda holder: holder.worker_id))
    return StoredState(bytes.fromhex(key), EntryKind(kind), int(num_tokens), int(size_bytes), holders)


def document(answer: Sequence[str]) -> DocumentRecord:
    """One registered document."""
    document_id, title, tags, num_tokens, version, digest = answer
    return DocumentRecord(
        document_id, title, tuple(json.loads(tags)), bytes.fromhex(digest), int(num_tokens), int(version)
    )


def removed_copies(answer: Sequence[str]) -> tuple[RemovedCopy, ...]:
    """Copies that left the index."""
    fields = zip(answer[::4], answer[1::4], answer[2::4], answer[3::4], strict=True)
    return tuple(RemovedCopy(bytes.fromhex(key), worker, tier, int(size)) for key, worker, tier, size in fields)


def record(answer: Sequence[str]) -> EntryRecord:
    """The description of a published entry: names and values of its fields in turn, `scopes` in place of their kinds."""
    fields = dict(zip(answer[::2], answer[1::2], strict=True))
    scopes = frozenset(fields["scopes"])
    tenant = next(scope for scope in scopes if scope.startswith("tenant:"))
    model = next(scope for scope in scopes if scope.startswith("model:"))
    return record_of(fields | {"tenant": tenant, "model": model, "documents": scopes - {tenant, model}})


def claimed(claim: Claim) -> dict[str, object]:
    """A claim, with what its receipt says."""
    return {**described(claim.record), "tier": claim.tier}


def keys(answers: Sequence[str]) -> tuple[bytes, ...]:
    """Keys from their hexadecimal form."""
    return tuple(bytes.fromhex(answer) for answer in answers)


def worker_fields(record: WorkerRecord) -> dict[str, object]:
    """The fields of a heartbeat that say who it is."""
    return {"worker": record.worker_id, "address": record.address, "description": record.description.hex()}


def worker(worker_id: str, address: str, description: str) -> WorkerRecord:
    """A worker as `worker_fields` wrote it."""
    return WorkerRecord(worker_id, address, bytes.fromhex(description))
