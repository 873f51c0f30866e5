"""An entry's description as JSON holds it: in receipts, and for the scripts of the Redis directory."""

from collections.abc import Mapping
from typing import Any

from services.cache.domain.values import EntryKind, EntryRecord, Epochs, Scopes

__all__ = ["described", "record_of"]


def described(record: EntryRecord) -> dict[str, object]:
    """Every field by its name."""
    return {
        "key": record.key.hex(),
        "kind": record.kind,
        "tokens": record.num_tokens,
        "size": record.size_bytes,
        "fence": record.fence,
        "ticket": record.ticket_id,
        "tenant": record.scopes.tenant,
        "model": record.scopes.model,
        "documents": sorted(record.scopes.documents),
        "epochs": [record.epochs.tenant, record.epochs.model],
        "life": record.life,
    }


def record_of(fields: Mapping[str, Any]) -> EntryRecord:
    """What `described` wrote.

    Raises:
        KeyError: a field is missing.
    """
    tenant_epoch, model_epoch = fields["epochs"]
    return EntryRecord(
        key=bytes.fromhex(fields["key"]),
        kind=EntryKind(fields["kind"]),
        num_tokens=int(fields["tokens"]),
        size_bytes=int(fields["size"]),
        fence=int(fields["fence"]),
        ticket_id=fields["ticket"],
        scopes=Scopes(fields["tenant"], fields["model"], frozenset(fields["documents"])),
        epochs=Epochs(int(tenant_epoch), int(model_epoch)),
        life=fields["life"],
    )
