"""Registered documents: what a tenant's ids stand for now, and what is stored of them."""

from dataclasses import dataclass

from blake3 import blake3

from services.cache.domain.directory import Directory
from services.cache.domain.errors import InvalidOrderError
from services.cache.domain.keys import KeyDeriver
from services.cache.domain.orders import RegisterOrder, RegisterReply
from services.cache.domain.values import DIGEST_BYTES, DocumentRecord, StoredState

__all__ = ["DocumentDescription", "DocumentPage", "DocumentRegistry", "key_digest"]

_MAX_PAGE = 100


@dataclass(frozen=True, slots=True)
class DocumentDescription:
    """`record` is None for a document that requests named without registering it, or that is pinned ahead.

    `is_pinned`: its states are not evicted, be it for its own sake or its tenant's.
    """

    record: DocumentRecord | None
    states: tuple[StoredState, ...]
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class DocumentPage:
    """Descriptions in the order of their ids."""

    documents: tuple[DocumentDescription, ...]
    has_more: bool


class DocumentRegistry:
    """Derives the scopes of documents and tags; the directory keeps them."""

    def __init__(self, directory: Directory, secret: bytes) -> None:
        self._directory = directory
        self._keys = KeyDeriver(secret)

    async def register(self, tenant: str, record: DocumentRecord) -> RegisterReply:
        """Make a document the current one of its id; see `Directory.register`.

        Raises:
            InvalidOrderError: a field is malformed; the message names it.
        """
        if not record.document_id:
            raise InvalidOrderError("document.id: must not be empty")
        if len(record.digest) != DIGEST_BYTES:
            raise InvalidOrderError(f"document.digest: must have {DIGEST_BYTES} bytes")
        if not all(record.tags):
            raise InvalidOrderError("tags: must not be empty")
        order = RegisterOrder(
            tenant=self._keys.tenant_scope(tenant),
            scope=self._keys.document_scope(tenant, record.document_id),
            tags=tuple(self._keys.tag_scope(tenant, tag) for tag in record.tags),
            record=record,
        )
        return await self._directory.register(order)

    async def describe(self, tenant: str, document_id: str) -> DocumentDescription | None:
        """A document and what is stored of it; None when nothing is known of it."""
        scope = self._keys.document_scope(tenant, document_id)
        record = await self._directory.find_document(scope)
        states = await self._directory.states(scope)
        pinned = await self._directory.pinned((scope, self._keys.tenant_scope(tenant)))
        if not record and not states and scope not in pinned:
            return None
        return DocumentDescription(record, states, bool(pinned))

    async def page(self, tenant: str, after: str, limit: int) -> DocumentPage:
        """Registered documents behind an id; at most 100.

        Raises:
            InvalidOrderError: the limit is malformed.
        """
        if not 0 < limit <= _MAX_PAGE:
            raise InvalidOrderError(f"limit: must lie between 1 and {_MAX_PAGE}")
        records = await self._directory.list_documents(self._keys.tenant_scope(tenant), after, limit + 1)
        found = {self._keys.document_scope(tenant, record.document_id): record for record in records[:limit]}
        pinned = await self._directory.pinned((*found, self._keys.tenant_scope(tenant)))
        documents = [
            DocumentDescription(
                record,
                await self._directory.states(scope),
                bool(pinned & {scope, self._keys.tenant_scope(tenant)}),
            )
            for scope, record in found.items()
        ]
        return DocumentPage(tuple(documents), len(records) > limit)


def key_digest(key: bytes) -> bytes:
    """Names a stored key to people without telling it."""
    return blake3(key, derive_key_context="hypic cache 1 key digest").digest(length=16)
