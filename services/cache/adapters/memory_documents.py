"""Registered documents of the in-memory directory. `lua/documents.lua` holds the same steps for Redis."""

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.cache.domain.integrity import RecordState
from services.cache.domain.orders import DocumentRef, RegisterOrder
from services.cache.domain.values import DocumentRecord

__all__ = ["DocumentTable"]


@dataclass(slots=True)
class DocumentTable:
    """Registrations by their document's scope, and the scopes of tenant and tags that they fall with."""

    orders: dict[str, RegisterOrder] = field(default_factory=dict)
    documents_of: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def find(self, scope: str) -> DocumentRecord | None:
        """The registration of a document's scope."""
        order = self.orders.get(scope)
        return order.record if order else None

    def version(self, scope: str) -> int:
        """The registered version of a document's scope; 0 when there is none."""
        record = self.find(scope)
        return record.version if record else 0

    def is_superseded(self, ref: DocumentRef) -> bool:
        """Whether another text is registered under this document's id."""
        record = self.find(ref.scope)
        return record is not None and record.digest != ref.digest

    def tags(self, scope: str) -> tuple[str, ...]:
        """Scopes of the tags of a document; none when it is not registered."""
        order = self.orders.get(scope)
        return order.tags if order else ()

    def put(self, order: RegisterOrder) -> None:
        """Register a document whose scope is free."""
        self.orders[order.scope] = order
        for scope in (order.tenant, *order.tags):
            self.documents_of[scope].add(order.scope)

    def remove(self, scope: str, epoch: int) -> list[str]:
        """Forget the document of this scope, or all of this tenant or tag, registered before the epoch; their scopes."""
        found = (scope,) if scope in self.orders else tuple(self.documents_of.get(scope, ()))
        older = [document for document in found if self.orders[document].record.version < epoch]
        for document in older:
            order = self.orders.pop(document)
            for outer in (order.tenant, *order.tags):
                self._unlink(outer, document)
        return older

    def _unlink(self, outer: str, document: str) -> None:
        documents = self.documents_of[outer]
        documents.discard(document)
        if not documents:
            del self.documents_of[outer]

    def page(self, tenant: str, after: str, limit: int) -> tuple[DocumentRecord, ...]:
        """The first `limit` documents of a tenant behind an id."""
        start = after.encode()
        records: Iterable[DocumentRecord] = (self.orders[scope].record for scope in self.documents_of.get(tenant, ()))
        behind = (record for record in records if record.document_id.encode() > start)
        return tuple(heapq.nsmallest(limit, behind, key=lambda record: record.document_id.encode()))

    def snapshot(self) -> dict[str, RecordState]:
        """A copy, for integrity checks."""
        return {
            scope: RecordState(order.tenant, frozenset(order.tags), order.record.version)
            for scope, order in self.orders.items()
        }
