"""Derivation of stored keys and scope digests: keyed BLAKE3 over length-prefixed fields.

Without the secret nobody can compute a key, so a tenant can neither guess nor name another tenant's entries.
"""

from dataclasses import dataclass

from blake3 import blake3

from services.cache.domain.values import KEY_BYTES, EntryKind, Epochs, Namespace

__all__ = ["DocumentScopes", "EntryKeys", "KeyDeriver", "KeyOwner", "pack_fields"]

_SCOPE_BYTES = 16


def pack_fields(*fields: bytes) -> bytes:
    """Join fields, each behind its length in 8 bytes, so that different field lists never give equal bytes."""
    return b"".join(len(field).to_bytes(8, "big") + field for field in fields)


@dataclass(frozen=True, slots=True)
class KeyOwner:
    """What all stored keys of a plan are computed over, besides the secret."""

    namespace: Namespace
    model: str
    epochs: Epochs
    profile_digest: str


class EntryKeys:
    """Stored keys of one owner; what they have in common is hashed once."""

    def __init__(self, common: blake3) -> None:
        # As `pack_fields(kind, content_hash)` has it, up to the content.
        length = KEY_BYTES.to_bytes(8, "big")
        self._of_kind = {kind: common.copy().update(pack_fields(kind.encode()) + length) for kind in EntryKind}

    def key(self, kind: EntryKind, content_hash: bytes) -> bytes:
        """The stored key; both have `KEY_BYTES`."""
        return self._of_kind[kind].copy().update(content_hash).digest()


class DocumentScopes:
    """Scopes of one tenant's documents; what they have in common is hashed once."""

    def __init__(self, common: blake3) -> None:
        self._common = common

    def scope(self, document_id: str) -> str:
        """One document, under every salt."""
        digest = self._common.copy().update(pack_fields(document_id.encode())).hexdigest(length=_SCOPE_BYTES)
        return f"document:{digest}"


class KeyDeriver:
    """Holds keys derived from the service's secret; pure otherwise."""

    def __init__(self, secret: bytes) -> None:
        self._entry_key = blake3(secret, derive_key_context="hypic cache 1 entry key").digest()
        self._scope_key = blake3(secret, derive_key_context="hypic cache 1 scope").digest()

    def entry_keys(self, owner: KeyOwner) -> "EntryKeys":
        """The keys of everything that is stored for one owner."""
        fields = pack_fields(
            owner.namespace.tenant.encode(),
            owner.namespace.salt.encode(),
            str(owner.epochs.tenant).encode(),
            owner.model.encode(),
            str(owner.epochs.model).encode(),
            owner.profile_digest.encode(),
        )
        return EntryKeys(blake3(fields, key=self._entry_key))

    def tenant_scope(self, tenant: str) -> str:
        """Everything of a tenant, under every salt."""
        return self._scope("tenant", tenant)

    def model_scope(self, model: str) -> str:
        """Everything that a model computed, of every tenant."""
        return self._scope("model", model)

    def document_scopes(self, tenant: str) -> DocumentScopes:
        """Those of a tenant's documents."""
        return DocumentScopes(blake3(pack_fields(b"document", tenant.encode()), key=self._scope_key))

    def document_scope(self, tenant: str, document_id: str) -> str:
        """One document of a tenant, under every salt."""
        return self.document_scopes(tenant).scope(document_id)

    def tag_scope(self, tenant: str, tag: str) -> str:
        """Every document of a tenant that was registered with this tag."""
        return self._scope("tag", tenant, tag)

    def _scope(self, kind: str, *names: str) -> str:
        fields = pack_fields(kind.encode(), *(name.encode() for name in names))
        return f"{kind}:{blake3(fields, key=self._scope_key).hexdigest(length=_SCOPE_BYTES)}"
