"""Small blobs in Redis: above a few MiB reading them takes longer than computing them (design §7)."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import redis

from services.blob.planes import Buffer
from services.blob.reader import BlobSource, BytesSource
from services.worker.tiers.indexed import IndexedStore

__all__ = ["RedisStore"]

_CALL_SECONDS = 2.0


class RedisStore(IndexedStore):
    """See `BlobStore`. Blobs of one owner, under `prefix:blob:owner:`; a hash beside them lists their sizes.

    blob_max_bytes: larger ones are not taken. What an earlier process of the owner left is taken back, where Redis answers.
    """

    tier = "redis"

    def __init__(self, url: str, prefix: str, owner: str, capacity_bytes: int, blob_max_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._client = redis.Redis.from_url(url, socket_timeout=_CALL_SECONDS, socket_connect_timeout=_CALL_SECONDS)
        self._blobs = f"{prefix}:blob:{owner}:"
        self._listing = f"{prefix}:blobs:{owner}"
        self._blob_max_bytes = blob_max_bytes
        # One put at a time: what leaves for one is gone before another may bring it back.
        self._lock = threading.Lock()

    def take_back(self) -> None:
        """List what an earlier process left.

        Raises:
            OSError: Redis does not answer.
        """
        for key, size in self._listed().items():
            if not self._index.add(key, size):
                self._remove(key)

    def put(self, key: bytes, pieces: Sequence[Buffer]) -> bool:
        """See `BlobStore`."""
        with self._lock:
            return self._put(key, pieces)

    def _put(self, key: bytes, pieces: Sequence[Buffer]) -> bool:
        size = sum(len(piece) for piece in pieces)
        leaving = self._index.reserve(size) if size <= self._blob_max_bytes else None
        if leaving is None:
            return False
        try:
            with _as_os_error(), self._client.pipeline(transaction=True) as transaction:
                for other in leaving:
                    transaction.delete(self._name(other))
                    transaction.hdel(self._listing, other)
                transaction.set(self._name(key), b"".join(pieces))
                transaction.hset(self._listing, key, size)
                transaction.execute()
        except OSError:
            self._index.give_up(size)
            raise
        self._index.commit(key, size)
        return True

    def open(self, key: bytes) -> BlobSource | None:
        """See `BlobStore`. One call brings all bytes."""
        if not self._index.use(key):
            return None
        with _as_os_error():
            blob = self._client.get(self._name(key))
        if isinstance(blob, bytes):
            return BytesSource(blob)
        self._index.remove(key)
        return None

    def delete(self, key: bytes) -> bool:
        """See `BlobStore`. Unlisted first, so that a Redis that does not answer brings nothing back."""
        was_there = self._index.remove(key)
        self._remove(key)
        return was_there

    def close(self) -> None:
        """See `BlobStore`."""
        self._client.close()

    def _held_sizes(self) -> tuple[Mapping[bytes, int], Mapping[bytes, int]]:
        """What Redis lists and does not hold counts as empty."""
        with self._lock, _as_os_error():
            held = {key: int(self._client.strlen(self._name(key))) for key in self._listed()}
        return held, self.sizes()

    def _listed(self) -> dict[bytes, int]:
        with _as_os_error():
            found = self._client.hgetall(self._listing)
        return {key: int(size) for key, size in found.items() if isinstance(key, bytes)}

    def _name(self, key: bytes) -> str:
        return self._blobs + key.hex()

    def _remove(self, key: bytes) -> None:
        with _as_os_error(), self._client.pipeline(transaction=True) as transaction:
            transaction.delete(self._name(key))
            transaction.hdel(self._listing, key)
            transaction.execute()


@contextmanager
def _as_os_error() -> Iterator[None]:
    """The port knows one kind of failure of a medium."""
    try:
        yield
    except redis.RedisError as error:
        raise OSError(f"Redis: {error}") from error
