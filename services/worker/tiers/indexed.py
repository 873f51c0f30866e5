"""What stores have in common that list their blobs in this process."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from services.worker.tiers.recency import RecencyIndex

__all__ = ["IndexedStore"]


class IndexedStore(ABC):
    """The part of `BlobStore` that an index answers by itself; `_index` lists what the medium holds."""

    def __init__(self, capacity_bytes: int) -> None:
        self._index = RecencyIndex(capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """See `BlobStore`."""
        return self._index.used_bytes

    @property
    def num_blobs(self) -> int:
        """See `BlobStore`."""
        return self._index.num_blobs

    @property
    def capacity_bytes(self) -> int:
        """See `BlobStore`."""
        return self._index.capacity_bytes

    def size(self, key: bytes) -> int | None:
        """See `BlobStore`."""
        return self._index.size(key)

    def sizes(self) -> Mapping[bytes, int]:
        """See `BlobStore`."""
        return self._index.sizes()

    def check_integrity(self) -> None:
        """See `BlobStore`."""
        self._index.check_integrity()
        held, listed = self._held_sizes()
        if held != listed:
            raise AssertionError(f"{len(held)} blobs are held, {len(listed)} are listed, and not all are the same")

    @abstractmethod
    def _held_sizes(self) -> tuple[Mapping[bytes, int], Mapping[bytes, int]]:
        """Bytes of every blob on the medium, and of every one that is listed, at one moment."""
