"""The nouns of the directory: entries, their scopes and epochs, holders.

What a plan makes of each of its parts is a named tuple, here and elsewhere: it is made in half the time of a frozen
dataclass.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "DIGEST_BYTES",
    "KEY_BYTES",
    "PUBLIC_TENANT",
    "DocumentRecord",
    "EntryKind",
    "EntryRecord",
    "Epochs",
    "Holder",
    "Limits",
    "Namespace",
    "PlanOutcome",
    "PublishOutcome",
    "RegisterOutcome",
    "Removal",
    "RemovedCopy",
    "Scopes",
    "StoredState",
]

KEY_BYTES = 32
DIGEST_BYTES = 32
# Its states serve every tenant; only administrators fill it.
PUBLIC_TENANT = "public"


class EntryKind(StrEnum):
    """What an entry is: a segment state, or a snapshot of an exact prompt prefix."""

    SEGMENT = "segment"
    PREFIX = "prefix"


class PlanOutcome(StrEnum):
    """How a planned part stands: resident, to be computed by this request, or being computed by another.

    `LIVE`: absent, and seen too seldom to be captured.
    `SUPERSEDED`: another text is registered under one of its document ids; it is neither reused nor stored.
    """

    HIT = "hit"
    COLD = "cold"
    PENDING = "pending"
    SUPERSEDED = "superseded"
    LIVE = "live"


class PublishOutcome(StrEnum):
    """What became of a published state; everything but `ACCEPTED` tells the worker to drop its copy."""

    ACCEPTED = "accepted"
    FENCED = "fenced"
    OVER_BUDGET = "over_budget"
    INVALIDATED = "invalidated"


class RegisterOutcome(StrEnum):
    """What registering a document did. `UNCHANGED`: the same title, text and tags were registered already."""

    CREATED = "created"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who asks: the authenticated tenant and the request's salt (empty when none was given).

    `budget_bytes` is what copies of the tenant may hold; 0 leaves it to the directory's limits.
    """

    tenant: str
    salt: str
    budget_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Scopes:
    """What an entry falls with, as opaque digests: its tenant, its model, and every document that named it.

    `documents` holds the tags of registered documents too. Digests keep the words of tenants and documents out of
    receipts and of the store's index.
    """

    tenant: str
    model: str
    documents: frozenset[str]


@dataclass(frozen=True, slots=True)
class Epochs:
    """Sequence numbers of the last invalidation of a tenant and of a model; 0 when there was none."""

    tenant: int
    model: int


class Holder(NamedTuple):
    """A worker that holds a copy, and where it keeps it (`host`, `gpu`)."""

    worker_id: str
    address: str
    tier: str


@dataclass(frozen=True, slots=True)
class StoredState:
    """A published entry as its document's description shows it; `size_bytes` of one copy."""

    key: bytes
    kind: EntryKind
    num_tokens: int
    size_bytes: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class DocumentRecord:
    """A registered document, in its tenant's own words. `digest` is over title and text, `version` grows with each."""

    document_id: str
    title: str
    tags: tuple[str, ...]
    digest: bytes
    num_tokens: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class RemovedCopy:
    """A copy that left the index; its worker is to drop it."""

    key: bytes
    worker_id: str
    tier: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Removal:
    """What an invalidation took away: entries, every copy of them, and registrations of documents."""

    num_entries: int = 0
    num_documents: int = 0
    copies: tuple[RemovedCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """The immutable description of a published entry. `fence` and `ticket_id` name the ticket that made its bytes.

    `life` is that of the directory that published it: another one may not know what was invalidated since.
    """

    key: bytes
    kind: EntryKind
    num_tokens: int
    size_bytes: int
    fence: int
    ticket_id: str
    scopes: Scopes
    epochs: Epochs
    life: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Policy of a directory.

    `namespace_budget_bytes` bounds the copies of each tenant without a budget of its own; 0 leaves the common budget.
    For `share_seconds` after its last plan a tenant has a share, an equal part of the budget, below which other tenants
    cannot bring it. `entry_ttl_seconds` is an entry's age at which it leaves, whoever uses it; 0 is never. Segments are
    captured when they are planned the `min_uses`-th time.
    `settle_seconds` is the age that a heartbeat in flight may have: a copy published later than that is not taken for
    lost because a heartbeat does not list it.
    `pinned_share` is the part of the budget that pins may keep.
    `max_remembered`: invalidated documents and tags, and scopes added to published entries, that are remembered; with the
    oldest that is forgotten, copies of its time lose the right to come back.
    `max_ghosts`: evicted keys that are remembered, of each kind; `max_eviction_pairs`: pairs of tenants of which one evicted
    the other.
    """

    budget_bytes: int
    ticket_seconds: float = 60.0
    worker_ttl_seconds: float = 15.0
    settle_seconds: float = 5.0
    namespace_budget_bytes: int = 0
    share_seconds: float = 3600.0
    entry_ttl_seconds: float = 0.0
    min_uses: int = 1
    pinned_share: float = 0.5
    max_remembered: int = 100_000
    max_ghosts: int = 50_000
    max_eviction_pairs: int = 256

    @property
    def pin_limit_bytes(self) -> int:
        """The most that pins may keep."""
        return int(self.budget_bytes * self.pinned_share)
