"""The tiers together: what they keep, where a blob lies, and what becomes of one that fails."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hypic.v1 import worker_pb2

from services.blob.errors import BlobError, DamagedBlobError, ForeignBlobError
from services.blob.layout import StateHeader
from services.blob.planes import Buffer
from services.blob.reader import StateReader
from services.common.telemetry import get_logger
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.served_model import ServedModel
from services.worker.tiers.port import BlobStore

__all__ = ["BlobTiers", "KeptState"]


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state that a tier kept through a restart."""

    key: bytes
    tier: str
    size_bytes: int
    num_tokens: int
    receipt: bytes


class BlobTiers:
    """Stores by tier, the nearest first. Safe for threads. Where a store fails, the blob is missing there and nothing else."""

    def __init__(self, served: ServedModel, stores: Sequence[BlobStore], metrics: WorkerMetrics) -> None:
        self._served = served
        self._stores = {store.tier: store for store in stores}
        self._metrics = metrics

    @property
    def stores(self) -> Collection[BlobStore]:
        """All, the nearest first."""
        return self._stores.values()

    def sizes(self, key: bytes) -> dict[str, int]:
        """Bytes of a blob by the tiers that list it, the nearest first."""
        found = {store.tier: store.size(key) for store in self.stores}
        return {tier: size for tier, size in found.items() if size is not None}

    def used_bytes(self) -> Mapping[str, int]:
        """Bytes of every tier."""
        return {store.tier: store.used_bytes for store in self.stores}

    def usage(self) -> list[worker_pb2.TierUsage]:
        """What every tier holds, the nearest first."""
        return [
            worker_pb2.TierUsage(
                tier=store.tier,
                num_states=store.num_blobs,
                used_bytes=store.used_bytes,
                capacity_bytes=store.capacity_bytes,
            )
            for store in self.stores
        ]

    def take_back(self) -> list[KeptState]:
        """What is there of this model and profile, with the directory's receipt; anything else is removed."""
        kept: dict[bytes, KeptState] = {}
        for store in self.stores:
            for key, size in store.sizes().items():
                header = self._read_header(store, key)
                if header is not None:
                    own = KeptState(key, store.tier, size, len(header.token_ids), header.receipt)
                    kept.setdefault(key, own)
        return list(kept.values())

    def put(self, key: bytes, pieces: Sequence[Buffer]) -> None:
        """Write a blob to every tier that takes it."""
        for store in self.stores:
            try:
                if store.put(key, pieces):
                    self._metrics.demotions.labels(store.tier).inc()
            except OSError as error:
                get_logger().warning("tier_failed", tier=store.tier, error=str(error))

    def open(self, tier: str, key: bytes) -> StateReader:
        """An opened blob of this model and profile.

        Raises:
            BlobError: it is damaged, or not of them.
            OSError: it cannot be read, or is not there.
        """
        source = self._stores[tier].open(key)
        if source is None:
            raise FileNotFoundError(f"{tier} has lost the blob")
        reader = StateReader(source)
        reader.header.check_origin(self._served.revision, self._served.profile_digest)
        return reader

    def give_up(self, tier: str, key: bytes, error: Exception) -> str:
        """A blob could not be used: what is of no use to anybody is removed. Returns the reason, for the reply."""
        get_logger().warning("blob_unusable", tier=tier, key=key.hex(), error=str(error))
        reason = _reason(error)
        if isinstance(error, DamagedBlobError):
            self._metrics.corrupt_blobs.labels(tier).inc()
        if isinstance(error, BlobError | FileNotFoundError):
            self._delete(self._stores[tier], key)
        return reason

    def delete(self, keys: Iterable[bytes]) -> int:
        """Remove blobs from every tier; returns how many keys any of them held."""
        removed = ([self._delete(store, key) for store in self.stores] for key in keys)
        return sum(any(own) for own in removed)

    def close(self) -> None:
        """Let go of the media."""
        for store in self.stores:
            store.close()

    def _delete(self, store: BlobStore, key: bytes) -> bool:
        try:
            return store.delete(key)
        except OSError as error:
            get_logger().warning("tier_failed", tier=store.tier, error=str(error))
            return False

    def _read_header(self, store: BlobStore, key: bytes) -> StateHeader | None:
        try:
            header = self.open(store.tier, key).header
            if not header.receipt:
                raise ForeignBlobError("the directory has never accepted it")
        except (BlobError, OSError) as error:
            self.give_up(store.tier, key, error)
            return None
        return header


def _reason(error: Exception) -> str:
    match error:
        case FileNotFoundError():
            return "blob_missing"
        case DamagedBlobError():
            return "blob_damaged"
        case ForeignBlobError():
            return "blob_foreign"
        case OSError():
            return "tier_unreachable"
        case _:
            return "fetch_failed"
