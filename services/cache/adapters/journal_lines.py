"""Changes as the journal's lines write them."""

from collections.abc import Mapping
from typing import Any

from services.cache.domain.changes import Change, Floor, Invalidated, Linked, Pinned, Registered, Unpinned
from services.cache.domain.orders import RegisterOrder
from services.cache.domain.values import DocumentRecord

__all__ = ["change_of", "fields_of"]


def fields_of(change: Change) -> dict[str, object]:
    """A change as JSON holds it; what names it comes first."""
    match change:
        case Invalidated(scope, epoch):
            return {"invalidated": scope, "epoch": epoch}
        case Registered(order):
            return {"registered": order.scope, **_order_fields(order)}
        case Linked(key, scope, sequence):
            return {"linked": key.hex(), "scope": scope, "sequence": sequence}
        case Pinned(scope):
            return {"pinned": scope}
        case Unpinned(scope):
            return {"unpinned": scope}
        case Floor(sequence):
            return {"floor": sequence}


def change_of(fields: Mapping[str, Any]) -> Change:
    """What `fields_of` wrote.

    Raises:
        ValueError: nothing that it writes; so do a field that is missing or of another type.
        KeyError, TypeError: as above.
    """
    match next(iter(fields)):
        case "invalidated":
            return Invalidated(fields["invalidated"], int(fields["epoch"]))
        case "registered":
            return Registered(_order(fields))
        case "linked":
            return Linked(bytes.fromhex(fields["linked"]), fields["scope"], int(fields["sequence"]))
        case "pinned":
            return Pinned(fields["pinned"])
        case "unpinned":
            return Unpinned(fields["unpinned"])
        case "floor":
            return Floor(int(fields["floor"]))
        case other:
            raise ValueError(f"{other} is no change")


def _order_fields(order: RegisterOrder) -> dict[str, object]:
    record = order.record
    return {
        "tenant": order.tenant,
        "tag_scopes": order.tags,
        "id": record.document_id,
        "title": record.title,
        "tags": record.tags,
        "digest": record.digest.hex(),
        "tokens": record.num_tokens,
        "version": record.version,
    }


def _order(fields: Mapping[str, Any]) -> RegisterOrder:
    record = DocumentRecord(
        document_id=fields["id"],
        title=fields["title"],
        tags=tuple(fields["tags"]),
        digest=bytes.fromhex(fields["digest"]),
        num_tokens=int(fields["tokens"]),
        version=int(fields["version"]),
    )
    return RegisterOrder(fields["tenant"], fields["registered"], tuple(fields["tag_scopes"]), record)
