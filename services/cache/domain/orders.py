"""Orders and replies that cross the port of the directory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from services.cache.domain.evictions import Miss
from services.cache.domain.values import (
    DocumentRecord,
    EntryKind,
    EntryRecord,
    Holder,
    PlanOutcome,
    PublishOutcome,
    RegisterOutcome,
    Removal,
)

__all__ = [
    "Claim",
    "Copy",
    "DocumentRef",
    "HeartbeatReply",
    "PinReply",
    "PlanOrder",
    "PlanReply",
    "PlannedEntry",
    "PublishOrder",
    "PublishReply",
    "RegisterOrder",
    "RegisterReply",
    "Ticket",
    "Usage",
    "Wanted",
]


@dataclass(frozen=True, slots=True)
class DocumentRef:
    """A document whose text stands in a part: its scope, and the digest of its title and text."""

    scope: str
    digest: bytes


class Wanted(NamedTuple):
    """One reusable part of a request: the stored key and what is known of the entry before it exists.

    `public_key` is the same content's key in the public namespace; None where that is not consulted.
    """

    key: bytes
    kind: EntryKind
    num_tokens: int
    documents: tuple[DocumentRef, ...] = ()
    public_key: bytes | None = None


@dataclass(frozen=True, slots=True)
class PlanOrder:
    """All reusable parts of one request. `epochs` are those, by scope, that the keys were derived with.

    `lease_id` is new and random, or (`extends`) that of an earlier plan. `nonce` is random; ticket ids are made of it.
    `budget_bytes` replaces `Limits.namespace_budget_bytes` for this tenant from now on, unless it is 0. `admit_all` gives
    tickets to segments however seldom they were planned.
    """

    lease_id: str
    extends: bool
    nonce: str
    lease_seconds: float
    tenant: str
    model: str
    epochs: Mapping[str, int]
    wanted: tuple[Wanted, ...]
    budget_bytes: int = 0
    admit_all: bool = False


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to compute and publish one key."""

    ticket_id: str
    fence: int
    expires_in_seconds: float


class PlannedEntry(NamedTuple):
    """`holders` with HIT, `ticket` with COLD, `owner_expires_in_seconds` with PENDING.

    `miss` with a segment that nobody has, nor computes: it is cold by this order, or live, for the first time in it.
    """

    outcome: PlanOutcome
    key: bytes
    holders: tuple[Holder, ...] = ()
    ticket: Ticket | None = None
    owner_expires_in_seconds: float = 0.0
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class PlanReply:
    """Entries in the order of `PlanOrder.wanted`."""

    lease_id: str
    entries: tuple[PlannedEntry, ...]


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """A worker's claim that it holds the state of a key, with the ticket that entitles it."""

    key: bytes
    ticket_id: str
    fence: int
    worker_id: str
    tier: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PublishReply:
    """`drop_keys`: evicted copies of the publishing worker. `record`: with ACCEPTED, what the receipt is made of.

    `num_evicted` entries in all, the first `num_evicted_own` of them for the tenant's own budget.
    """

    outcome: PublishOutcome
    drop_keys: tuple[bytes, ...] = ()
    num_evicted: int = 0
    num_evicted_own: int = 0
    record: EntryRecord | None = None


@dataclass(frozen=True, slots=True)
class RegisterOrder:
    """A document that is to be the current one of its scope, with the scopes of its tenant and tags."""

    tenant: str
    scope: str
    tags: tuple[str, ...]
    record: DocumentRecord


@dataclass(frozen=True, slots=True)
class RegisterReply:
    """`removal`: what was stored under the scope for another text, or before it was registered."""

    outcome: RegisterOutcome
    version: int
    removal: Removal


@dataclass(frozen=True, slots=True)
class PinReply:
    """Published entries of the scope; what all pins may keep now, and the most that they may."""

    num_entries: int
    promised_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that a worker lists in its heartbeat."""

    key: bytes
    tier: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A copy that a worker lists, with the description from its opened receipt."""

    record: EntryRecord
    tier: str


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """Of the listed copies: those to drop, and those that the directory does not know (see `Directory.restore`)."""

    drop_keys: tuple[bytes, ...]
    unknown_keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """What the directory holds now."""

    num_entries: int
    used_bytes: int
    num_leases: int
    num_tickets: int
    num_workers: int
