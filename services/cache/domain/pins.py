"""Pins: which segment states are never evicted, and how much of the budget they may take."""

from services.cache.domain.directory import Directory
from services.cache.domain.errors import InvalidOrderError
from services.cache.domain.keys import KeyDeriver
from services.cache.domain.orders import PinReply

__all__ = ["Pins"]


class Pins:
    """Derives the scopes that are pinned; the directory keeps them."""

    def __init__(self, directory: Directory, secret: bytes) -> None:
        self._directory = directory
        self._keys = KeyDeriver(secret)

    async def pin_document(self, tenant: str, document_id: str) -> PinReply:
        """Evict no segment state of a tenant's document.

        Raises:
            InvalidOrderError: the id is empty.
            PinLimitError: all pins together would keep too much.
        """
        return await self._directory.pin(self._document_scope(tenant, document_id))

    async def pin_tenant(self, tenant: str, budget_bytes: int = 0) -> PinReply:
        """Evict no segment state of a tenant. `budget_bytes`: what it may hold, where that is known and not 0.

        Raises:
            PinLimitError: all pins together would keep too much.
        """
        return await self._directory.pin(self._keys.tenant_scope(tenant), budget_bytes)

    async def unpin_document(self, tenant: str, document_id: str) -> PinReply:
        """Let states of a document be evicted again, unless its tenant is pinned.

        Raises:
            InvalidOrderError: the id is empty.
        """
        return await self._directory.unpin(self._document_scope(tenant, document_id))

    async def unpin_tenant(self, tenant: str) -> PinReply:
        """Let a tenant's states be evicted again, but for pinned documents."""
        return await self._directory.unpin(self._keys.tenant_scope(tenant))

    def _document_scope(self, tenant: str, document_id: str) -> str:
        if not document_id:
            raise InvalidOrderError("document_id: must not be empty")
        return self._keys.document_scope(tenant, document_id)
