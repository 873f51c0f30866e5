"""Receipts: the directory's own signed description of an entry, handed to the worker that holds it.

A directory that lost its memory restores an entry from the receipt that comes with a heartbeat. It trusts its own
signature, not the worker: a receipt that was altered, belongs to another worker, or names another key opens nothing.
Whether a genuine receipt is still valid (epochs, documents, budget) is decided by the directory, in `restore`.
"""

import hmac
import json
from dataclasses import dataclass
from hashlib import sha256

from blake3 import blake3

from services.cache.domain.values import EntryKind, EntryRecord, Epochs, Scopes

__all__ = ["ReceiptSigner"]

_MAC_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Claim:
    worker_id: str
    record: EntryRecord


class ReceiptSigner:
    """Signs and opens receipts: HMAC-SHA256 over canonical JSON, with a key derived from the service's secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = blake3(secret, derive_key_context="hypic cache 1 receipt").digest()

    def sign(self, worker_id: str, record: EntryRecord) -> bytes:
        """The receipt of this worker's copy."""
        body = _encode(_Claim(worker_id, record))
        return self._mac(body) + body

    def open(self, receipt: bytes, worker_id: str, key: bytes) -> EntryRecord | None:
        """The description inside; None when it is forged, or not this worker's receipt for this key."""
        mac, body = receipt[:_MAC_BYTES], receipt[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            return None
        claim = _decode(body)
        return claim.record if claim.worker_id == worker_id and claim.record.key == key else None

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, sha256().name)


def _encode(claim: _Claim) -> bytes:
    record = claim.record
    fields = {
        "worker": claim.worker_id,
        "key": record.key.hex(),
        "kind": record.kind,
        "tokens": record.num_tokens,
        "size": record.size_bytes,
        "fence": record.fence,
        "ticket": record.ticket_id,
        "tenant": [record.scopes.tenant, record.epochs.tenant],
        "model": [record.scopes.model, record.epochs.model],
        "documents": sorted(record.scopes.documents),
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _decode(body: bytes) -> _Claim:
    fields = json.loads(body)
    (tenant, tenant_epoch), (model, model_epoch) = fields["tenant"], fields["model"]
    record = EntryRecord(
        key=bytes.fromhex(fields["key"]),
        kind=EntryKind(fields["kind"]),
        num_tokens=fields["tokens"],
        size_bytes=fields["size"],
        fence=fields["fence"],
        ticket_id=fields["ticket"],
        scopes=Scopes(tenant, model, frozenset(fields["documents"])),
        epochs=Epochs(tenant_epoch, model_epoch),
    )
    return _Claim(fields["worker"], record)
