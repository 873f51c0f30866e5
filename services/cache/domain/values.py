"""The nouns of the directory: entries, their scopes and epochs, holders."""

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "KEY_BYTES",
    "EntryKind",
    "EntryRecord",
    "Epochs",
    "Holder",
    "Limits",
    "Namespace",
    "PlanOutcome",
    "PublishOutcome",
    "Scopes",
]

KEY_BYTES = 32


class EntryKind(StrEnum):
    """What an entry is: a segment state, or a snapshot of an exact prompt prefix."""

    SEGMENT = "segment"
    PREFIX = "prefix"


class PlanOutcome(StrEnum):
    """How a planned part stands: resident, to be computed by this request, or being computed by another."""

    HIT = "hit"
    COLD = "cold"
    PENDING = "pending"


class PublishOutcome(StrEnum):
    """What became of a published state; everything but `ACCEPTED` tells the worker to drop its copy."""

    ACCEPTED = "accepted"
    FENCED = "fenced"
    OVER_BUDGET = "over_budget"
    INVALIDATED = "invalidated"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who asks: the authenticated tenant and the request's salt (empty when none was given)."""

    tenant: str
    salt: str


@dataclass(frozen=True, slots=True)
class Scopes:
    """What an entry falls with, as opaque digests: its tenant, its model, and every document that named it.

    Digests keep the words of tenants and documents out of the store and out of receipts.
    """

    tenant: str
    model: str
    documents: frozenset[str]


@dataclass(frozen=True, slots=True)
class Epochs:
    """Sequence numbers of the last invalidation of a tenant and of a model; 0 when there was none."""

    tenant: int
    model: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that holds a copy, and where it keeps it (`host`, `gpu`)."""

    worker_id: str
    address: str
    tier: str


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """The immutable description of a published entry. `fence` and `ticket_id` name the ticket that made its bytes."""

    key: bytes
    kind: EntryKind
    num_tokens: int
    size_bytes: int
    fence: int
    ticket_id: str
    scopes: Scopes
    epochs: Epochs


@dataclass(frozen=True, slots=True)
class Limits:
    """Policy of a directory.

    `settle_seconds` is the age that a heartbeat in flight may have: a copy published later than that is not taken for
    lost because a heartbeat does not list it.
    """

    budget_bytes: int
    ticket_seconds: float = 60.0
    worker_ttl_seconds: float = 15.0
    settle_seconds: float = 5.0
