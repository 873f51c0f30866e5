"""Receipts: the directory's own signed description of an entry, handed to the worker that holds it.

A directory that lost its memory restores an entry from the receipt that comes with a heartbeat. It trusts its own
signature, not the worker: a receipt that was altered, belongs to another worker, or names another key opens nothing.
Whether a genuine receipt is still valid (life, epochs, documents, budget) is decided by the directory, in `restore`.
"""

import hmac
import json
from hashlib import sha256

from blake3 import blake3

from services.cache.domain.descriptions import described, record_of
from services.cache.domain.values import EntryRecord

__all__ = ["ReceiptSigner"]

_MAC_BYTES = 32


class ReceiptSigner:
    """Signs and opens receipts: HMAC-SHA256 over canonical JSON, with a key derived from the service's secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = blake3(secret, derive_key_context="hypic cache 1 receipt").digest()

    def sign(self, worker_id: str, record: EntryRecord) -> bytes:
        """The receipt of this worker's copy."""
        fields = {"worker": worker_id, **described(record)}
        body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        return self._mac(body) + body

    def open(self, receipt: bytes, worker_id: str, key: bytes) -> EntryRecord | None:
        """The description inside; None when it is forged, or not this worker's receipt for this key."""
        mac, body = receipt[:_MAC_BYTES], receipt[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            return None
        fields = json.loads(body)
        if "life" not in fields:
            # Of a version that did not say which directory wrote it.
            return None
        return record_of(fields) if (fields["worker"], fields["key"]) == (worker_id, key.hex()) else None

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, sha256().name)
