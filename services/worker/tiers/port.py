"""The port that every tier implements."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.blob.planes import Buffer
from services.blob.reader import BlobSource

__all__ = ["BlobStore"]


class BlobStore(Protocol):
    """Blobs by key, within a budget of bytes; the least recently opened leave first. Safe for threads.

    A store never looks into a blob: whether its bytes are those that were written is found by whoever reads them.
    """

    @property
    def tier(self) -> str:
        """The tier's name: `host`, `disk`, `redis`."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of all listed blobs. Never waits for the store's medium."""
        ...

    @property
    def num_blobs(self) -> int:
        """How many are listed. Never waits for the store's medium."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """The budget."""
        ...

    def put(self, key: bytes, pieces: Sequence[Buffer]) -> bool:
        """Store a blob, whole or not at all, in place of what the key held. False: it is too large, and nothing changes.

        Raises:
            OSError: it cannot be written; the key holds nothing, or what it held.
        """
        ...

    def open(self, key: bytes) -> BlobSource | None:
        """The blob's bytes, from any place on; None where there is none, and then it is no longer listed.

        A source whose blob leaves while it is read raises OSError, or gives fewer bytes.

        Raises:
            OSError: the store does not answer.
        """
        ...

    def delete(self, key: bytes) -> bool:
        """Forget a blob; whether it was there.

        Raises:
            OSError: it cannot be removed.
        """
        ...

    def size(self, key: bytes) -> int | None:
        """Bytes of a listed blob, None of another. Never waits for the store's medium."""
        ...

    def sizes(self) -> Mapping[bytes, int]:
        """Bytes of every blob that is listed, the least recently opened first. Never waits for the store's medium."""
        ...

    def check_integrity(self) -> None:
        """What is listed is what is there, within the budget.

        Raises:
            AssertionError: it is not.
        """
        ...

    def close(self) -> None:
        """Let go of what the store holds of its medium; blobs that outlive a process stay."""
        ...
