"""Blobs as files of one directory. A file appears under its name only when it is whole, and is there after a restart."""

import os
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from services.blob.planes import Buffer
from services.blob.reader import BlobSource
from services.common.files import open_private, own_file, sync_directory, write_synchronised
from services.worker.tiers.indexed import IndexedStore

__all__ = ["DiskStore", "FileSource"]

_SUFFIX = ".safetensors"
_UNFINISHED = ".unfinished"
_LOCK = "lock"


class FileSource:
    """A file's bytes. It is opened for every read, so that nothing is left open when a reader goes away."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self.size = size

    def read(self, offset: int, size: int) -> memoryview:
        """See `BlobSource`."""
        buffer = bytearray(size)
        with self._path.open("rb", buffering=0) as file:
            file.seek(offset)
            filled = 0
            while filled < size and (got := file.readinto(memoryview(buffer)[filled:])):
                filled += got
        return memoryview(buffer)[:filled]


class DiskStore(IndexedStore):
    """See `BlobStore`. Takes back what an earlier process left; what that was still writing is removed.

    Raises:
        BlockingIOError: another process owns the directory.
        OSError: the directory cannot be written.
    """

    tier = "disk"

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._directory = directory
        self._lock = threading.Lock()
        self._numbers = count()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._owner = own_file(directory / _LOCK)
        self._scan()

    def put(self, key: bytes, pieces: Sequence[Buffer]) -> bool:
        """See `BlobStore`."""
        size = sum(len(piece) for piece in pieces)
        with self._lock:
            leaving = self._index.reserve(size)
            if leaving is None:
                return False
            for other in leaving:
                self._path(other).unlink(missing_ok=True)
        unfinished = self._directory / f"{key.hex()}.{next(self._numbers)}{_UNFINISHED}"
        try:
            # States say what their documents say: nobody else may read them.
            file = open_private(unfinished)
            try:
                write_synchronised(file, pieces)
            finally:
                os.close(file)
            with self._lock:
                unfinished.rename(self._path(key))
                self._index.commit(key, size)
        except OSError:
            self._index.give_up(size)
            unfinished.unlink(missing_ok=True)
            raise
        sync_directory(self._directory)
        return True

    def open(self, key: bytes) -> BlobSource | None:
        """See `BlobStore`."""
        if not self._index.use(key):
            return None
        path = self._path(key)
        try:
            # The order of use outlives the process as the order of times.
            os.utime(path)
            return FileSource(path, path.stat().st_size)
        except FileNotFoundError:
            self._index.remove(key)
            return None

    def delete(self, key: bytes) -> bool:
        """See `BlobStore`."""
        with self._lock:
            self._path(key).unlink(missing_ok=True)
            return self._index.remove(key)

    def close(self) -> None:
        """See `BlobStore`; another process may then take the directory."""
        os.close(self._owner)

    def _held_sizes(self) -> tuple[Mapping[bytes, int], Mapping[bytes, int]]:
        with self._lock:
            return {bytes.fromhex(path.stem): path.stat().st_size for path in self._files()}, self.sizes()

    def _path(self, key: bytes) -> Path:
        return self._directory / f"{key.hex()}{_SUFFIX}"

    def _files(self) -> list[Path]:
        """Blobs; what else lies there is somebody else's."""
        return [path for path in self._directory.glob(f"*{_SUFFIX}") if _is_key(path.stem)]

    def _scan(self) -> None:
        """Newest first into the budget; what does not fit, or was never finished, is removed."""
        for path in self._directory.glob(f"*{_UNFINISHED}"):
            path.unlink()
        found = [(path.stat(), path) for path in self._files()]
        found.sort(key=lambda one: one[0].st_mtime_ns, reverse=True)
        kept = []
        room = self._index.capacity_bytes
        for stat, path in found:
            if stat.st_size <= room:
                room -= stat.st_size
                kept.append((bytes.fromhex(path.stem), stat.st_size))
            else:
                path.unlink()
        for key, size in reversed(kept):
            self._index.add(key, size)


def _is_key(stem: str) -> bool:
    try:
        return bytes.fromhex(stem).hex() == stem
    except ValueError:
        return False
