"""The life of documents: what is registered, stored and taken away, and the ports behind it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from services.router.domain.errors import RouterError
from services.router.domain.parts import DocumentRef
from services.router.domain.request import Document, Namespace

__all__ = [
    "DirectoryLostError",
    "DocumentDirectory",
    "DocumentDraft",
    "DocumentInfo",
    "DocumentNotFoundError",
    "DocumentPage",
    "Holder",
    "RegisterAnswer",
    "Registered",
    "Removal",
    "RemovedCopies",
    "ScopeKind",
    "StateInfo",
    "document_ref",
]


class DirectoryLostError(RouterError):
    """The cache service does not answer, so that a document's life cannot be changed or told."""

    def __init__(self) -> None:
        super().__init__("the cache service cannot be reached now; the call may be sent again")


class DocumentNotFoundError(RouterError):
    """Nothing is known of a document."""

    def __init__(self, document_id: str) -> None:
        super().__init__(f"there is no document {document_id!r}")


class ScopeKind(StrEnum):
    """What an invalidation takes away."""

    DOCUMENT = "document"
    TAG = "tag"
    TENANT = "tenant"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class DocumentDraft:
    """A document that is to be registered; it has an id."""

    document: Document
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that holds a copy, and in which tier."""

    worker_id: str
    tier: str


@dataclass(frozen=True, slots=True)
class StateInfo:
    """A stored state of a document, or a snapshot that it stands in; `size_bytes` of one copy."""

    key_digest: bytes
    kind: str
    num_tokens: int
    size_bytes: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """A document and what is stored of it; `version` 0 when requests named it without registering it.

    `is_pinned`: its segment states are never evicted.
    """

    document_id: str
    title: str = ""
    tags: tuple[str, ...] = ()
    digest: bytes = b""
    num_tokens: int = 0
    version: int = 0
    states: tuple[StateInfo, ...] = ()
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class DocumentPage:
    """Registered documents in the order of their ids."""

    documents: tuple[DocumentInfo, ...]
    has_more: bool


@dataclass(frozen=True, slots=True)
class RemovedCopies:
    """Copies that left the directory; `is_dropped` once their worker has confirmed it."""

    worker_id: str
    tier: str
    num_entries: int
    size_bytes: int
    keys: tuple[bytes, ...]
    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class Removal:
    """What an invalidation took away."""

    num_entries: int
    num_documents: int
    copies: tuple[RemovedCopies, ...]


@dataclass(frozen=True, slots=True)
class RegisterAnswer:
    """`outcome`: created, replaced or unchanged."""

    outcome: str
    removal: Removal


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered document. `reason` says why no state of it is stored; empty when one is."""

    outcome: str
    info: DocumentInfo
    reason: str
    removal: Removal


class DocumentDirectory(Protocol):
    """The cache service's calls about documents. Every method raises a `HypicError` when it cannot answer in time."""

    async def register(self, namespace: Namespace, draft: DocumentDraft, num_tokens: int) -> RegisterAnswer:
        """Make this text the current one of the document's id."""
        ...

    async def find(self, namespace: Namespace, document_id: str) -> DocumentInfo | None:
        """A document and what is stored of it."""
        ...

    async def page(self, namespace: Namespace, after: str, limit: int) -> DocumentPage:
        """Registered documents behind an id."""
        ...

    async def invalidate(self, namespace: Namespace, kind: ScopeKind, name: str) -> Removal:
        """Make a scope unreachable; `name` is unused for a tenant, which the namespace names."""
        ...


def document_ref(document: Document) -> DocumentRef:
    """A document with an id as look-ups name it."""
    return DocumentRef(document.document_id, document.digest)
