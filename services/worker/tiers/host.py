"""Blobs in the host's memory; on a GPU in pinned memory, from which the device copies by itself."""

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from services.blob.planes import Buffer
from services.blob.reader import BlobSource, BytesSource
from services.worker.tiers.indexed import IndexedStore

__all__ = ["HostStore", "allocate_pageable", "allocate_pinned"]


def allocate_pageable(size: int) -> memoryview:
    """Ordinary memory."""
    return memoryview(bytearray(size))


def allocate_pinned(size: int) -> memoryview:
    """Pinned memory. torch rounds blocks up to powers of two and keeps them for later ones."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data


class HostStore(IndexedStore):
    """See `BlobStore`."""

    tier = "host"

    def __init__(self, capacity_bytes: int, allocate: Callable[[int], memoryview] = allocate_pageable) -> None:
        super().__init__(capacity_bytes)
        self._allocate = allocate
        self._lock = threading.Lock()
        self._blobs: dict[bytes, memoryview] = {}

    def put(self, key: bytes, pieces: Sequence[Buffer]) -> bool:
        """See `BlobStore`."""
        size = sum(len(piece) for piece in pieces)
        with self._lock:
            leaving = self._index.reserve(size)
            if leaving is None:
                return False
            for other in leaving:
                del self._blobs[other]
        blob, offset = self._allocate(size), 0
        for piece in pieces:
            blob[offset : offset + len(piece)] = piece
            offset += len(piece)
        with self._lock:
            self._blobs[key] = blob
            self._index.commit(key, size)
        return True

    def open(self, key: bytes) -> BlobSource | None:
        """See `BlobStore`. The bytes stay while they are read, whatever becomes of the entry."""
        blob = self._blobs.get(key)
        return BytesSource(blob) if blob is not None and self._index.use(key) else None

    def delete(self, key: bytes) -> bool:
        """See `BlobStore`."""
        with self._lock:
            self._blobs.pop(key, None)
            return self._index.remove(key)

    def close(self) -> None:
        """See `BlobStore`."""
        self._blobs.clear()

    def _held_sizes(self) -> tuple[Mapping[bytes, int], Mapping[bytes, int]]:
        with self._lock:
            return {key: len(blob) for key, blob in self._blobs.items()}, self.sizes()
