"""The invariants of a directory, over a snapshot that every adapter can produce."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.cache.domain.errors import IntegrityError
from services.cache.domain.values import EntryKind

__all__ = ["EntryState", "LeaseState", "RecordState", "Snapshot", "TicketState", "require_integrity", "violations"]

Keys = frozenset[bytes]
Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class EntryState:
    """A published key: its size, its tenant's scope, its ticket's fence, who holds it, which leases protect it.

    `num_leases`: how many the directory takes for protecting it.
    """

    size_bytes: int
    tenant: str
    fence: int
    holders: Names
    leases: Names
    num_leases: int
    kind: EntryKind = EntryKind.SEGMENT


@dataclass(frozen=True, slots=True)
class TicketState:
    """A ticket; `dead` once its key was invalidated."""

    key: bytes
    fence: int
    lease_id: str
    dead: bool


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What a lease protects and owns."""

    keys: Keys
    ticket_ids: Names


@dataclass(frozen=True, slots=True)
class RecordState:
    """A registered document: the scopes of its tenant and tags."""

    tenant: str
    tags: Names
    version: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a directory stores. `idle`: evictable keys by tenant; `ticket_of`: live ticket by key.

    `pinned` are scopes, `ages` the fences of published keys.

    `epochs` are of invalidated scopes, `links` what published keys fall with beyond their receipts, `past` both of them
    that are forgotten one day: (key, scope), without a key for an epoch.

    `tenant_bytes` and `tenant_budgets` are by tenant's scope, a missing budget is none; `records` by document's scope,
    `records_of` by scope of a tenant or tag.
    """

    budget_bytes: int
    used_bytes: int
    sequence: int
    entries: Mapping[bytes, EntryState]
    tickets: Mapping[str, TicketState]
    ticket_of: Mapping[bytes, str]
    leases: Mapping[str, LeaseState]
    idle: Mapping[str, Keys]
    pinned: Names
    ages: Mapping[bytes, int]
    held: Mapping[str, Keys]
    marked: Mapping[str, Keys]
    scopes_of: Mapping[bytes, Names]
    keys_of_scope: Mapping[str, Keys]
    tenant_bytes: Mapping[str, int]
    tenant_budgets: Mapping[str, int]
    epochs: Mapping[str, int]
    links: Mapping[bytes, Names]
    past: frozenset[tuple[bytes, str]]
    records: Mapping[str, RecordState]
    records_of: Mapping[str, Names]


def require_integrity(snapshot: Snapshot) -> None:
    """Raise `IntegrityError` that lists every violation."""
    found = violations(snapshot)
    if found:
        raise IntegrityError("; ".join(found))


def violations(snapshot: Snapshot) -> list[str]:
    """One sentence for each broken invariant; empty when all hold."""
    return [
        *_bytes(snapshot),
        *_holders(snapshot),
        *_leases(snapshot),
        *_tickets(snapshot),
        *_scopes(snapshot),
        *_past(snapshot),
        *_records(snapshot),
    ]


def _bytes(snapshot: Snapshot) -> Iterator[str]:
    held = sum(entry.size_bytes * len(entry.holders) for entry in snapshot.entries.values())
    if held != snapshot.used_bytes:
        yield f"copies hold {held} bytes, the counter says {snapshot.used_bytes}"
    if held > snapshot.budget_bytes:
        yield f"copies hold {held} bytes of {snapshot.budget_bytes} allowed"
    by_tenant: Counter[str] = Counter()
    for entry in snapshot.entries.values():
        by_tenant[entry.tenant] += entry.size_bytes * len(entry.holders)
    if by_tenant != Counter(snapshot.tenant_bytes):
        yield "the counters of tenants' bytes disagree with their copies"
    for tenant, budget in snapshot.tenant_budgets.items():
        if by_tenant[tenant] > budget:
            yield f"copies of {tenant} hold {by_tenant[tenant]} bytes of {budget} allowed"


def _holders(snapshot: Snapshot) -> Iterator[str]:
    by_entry = {(worker, key) for key, entry in snapshot.entries.items() for worker in entry.holders}
    by_worker = {(worker, key) for worker, keys in snapshot.held.items() for key in keys}
    for worker, key in by_entry ^ by_worker:
        yield f"worker {worker} and entry {key.hex()} disagree about a copy"
    for key, entry in snapshot.entries.items():
        if not entry.holders:
            yield f"entry {key.hex()} has no holder"
    for worker, keys in snapshot.marked.items():
        if keys & snapshot.held.get(worker, frozenset()):
            yield f"worker {worker} holds copies that are marked for dropping"


def _leases(snapshot: Snapshot) -> Iterator[str]:
    by_entry = {(lease, key) for key, entry in snapshot.entries.items() for lease in entry.leases}
    by_lease = {(name, key) for name, lease in snapshot.leases.items() for key in lease.keys}
    for name, key in by_entry ^ by_lease:
        yield f"lease {name} and entry {key.hex()} disagree"
    for key, entry in snapshot.entries.items():
        if entry.num_leases != len(entry.leases):
            yield f"entry {key.hex()} counts {entry.num_leases} leases of {len(entry.leases)}"
    free = {
        (entry.tenant, key)
        for key, entry in snapshot.entries.items()
        if not entry.leases and not _is_pinned(snapshot, key, entry)
    }
    idle = {(tenant, key) for tenant, keys in snapshot.idle.items() for key in keys}
    if free != idle:
        yield f"{len(free)} entries are neither leased nor pinned, {len(idle)} are evictable, and not all are the same"
    if {key: entry.fence for key, entry in snapshot.entries.items()} != snapshot.ages:
        yield "entries and the index by age disagree"
    for name, lease in snapshot.leases.items():
        owned = {ticket_id for ticket_id, ticket in snapshot.tickets.items() if ticket.lease_id == name}
        if owned != lease.ticket_ids:
            yield f"lease {name} and its tickets disagree"


def _is_pinned(snapshot: Snapshot, key: bytes, entry: EntryState) -> bool:
    return entry.kind is EntryKind.SEGMENT and bool(snapshot.pinned & snapshot.scopes_of.get(key, frozenset()))


def _tickets(snapshot: Snapshot) -> Iterator[str]:
    live = {ticket_id: ticket.key for ticket_id, ticket in snapshot.tickets.items() if not ticket.dead}
    if {ticket_id: key for key, ticket_id in snapshot.ticket_of.items()} != live:
        yield "live tickets and the index by key disagree"
    for key in snapshot.ticket_of.keys() & snapshot.entries.keys():
        yield f"key {key.hex()} is both ticketed and published"
    if any(ticket.fence > snapshot.sequence for ticket in snapshot.tickets.values()):
        yield "a ticket's fence is ahead of the sequence"


def _scopes(snapshot: Snapshot) -> Iterator[str]:
    by_key = {(key, scope) for key, scopes in snapshot.scopes_of.items() for scope in scopes}
    by_scope = {(key, scope) for scope, keys in snapshot.keys_of_scope.items() for key in keys}
    if by_key != by_scope:
        yield "the two indexes of scopes disagree"
    occupied = snapshot.entries.keys() | snapshot.ticket_of.keys()
    if occupied != snapshot.scopes_of.keys():
        yield "scopes are kept for other keys than those published or ticketed"
    for key, scopes in snapshot.scopes_of.items():
        kinds = sorted(scope.split(":")[0] for scope in scopes)
        if [kind for kind in kinds if kind not in ("document", "tag")] != ["model", "tenant"]:
            yield f"key {key.hex()} has not one tenant and one model"
    for key, entry in snapshot.entries.items():
        if entry.tenant not in snapshot.scopes_of.get(key, frozenset()):
            yield f"entry {key.hex()} does not fall with its tenant"


def _past(snapshot: Snapshot) -> Iterator[str]:
    epochs = {(b"", scope) for scope in snapshot.epochs if not scope.startswith(("tenant:", "model:"))}
    links = {(key, scope) for key, scopes in snapshot.links.items() for scope in scopes}
    if epochs | links != snapshot.past:
        yield "invalidations and links disagree with their order"
    if any(epoch > snapshot.sequence for epoch in snapshot.epochs.values()):
        yield "an epoch is ahead of the sequence"
    for scope in snapshot.epochs.keys() & snapshot.records.keys():
        yield f"{scope} is registered, and has an epoch beside its version"


def _records(snapshot: Snapshot) -> Iterator[str]:
    by_record = {
        (document, scope) for document, record in snapshot.records.items() for scope in (record.tenant, *record.tags)
    }
    by_scope = {(document, scope) for scope, documents in snapshot.records_of.items() for document in documents}
    if by_record != by_scope:
        yield "the two indexes of registered documents disagree"
    if any(record.version > snapshot.sequence for record in snapshot.records.values()):
        yield "a document's version is ahead of the sequence"
