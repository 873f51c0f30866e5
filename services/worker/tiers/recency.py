"""Which blobs a store holds, in order of use, and which leave when another needs room."""

import threading
from collections.abc import Mapping

__all__ = ["RecencyIndex"]


class RecencyIndex:
    """Sizes by key, the least recently used first, within `capacity_bytes`. Safe for threads.

    Room for a blob is taken before it is written and counts as used from then on.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._sizes: dict[bytes, int] = {}
        self._used = 0
        self._reserved = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all listed blobs."""
        return self._used

    @property
    def num_blobs(self) -> int:
        """How many are listed."""
        return len(self._sizes)

    def size(self, key: bytes) -> int | None:
        """Bytes of a listed blob."""
        return self._sizes.get(key)

    def reserve(self, size: int) -> list[bytes] | None:
        """Take room for a blob; returns the keys that leave for it, which are no longer listed. None: it can never fit."""
        with self._lock:
            if size > self.capacity_bytes:
                return None
            leaving: list[bytes] = []
            while self._sizes and self._used + self._reserved + size > self.capacity_bytes:
                key = next(iter(self._sizes))
                self._used -= self._sizes.pop(key)
                leaving.append(key)
            self._reserved += size
            return leaving

    def commit(self, key: bytes, size: int) -> None:
        """The blob of a reservation is there, in place of what the key held."""
        with self._lock:
            self._reserved -= size
            self._used += size - self._sizes.pop(key, 0)
            self._sizes[key] = size

    def give_up(self, size: int) -> None:
        """The blob of a reservation will not come."""
        with self._lock:
            self._reserved -= size

    def add(self, key: bytes, size: int) -> bool:
        """List a blob that is there already; False where it does not fit."""
        with self._lock:
            if self._used + size > self.capacity_bytes:
                return False
            self._sizes[key] = size
            self._used += size
            return True

    def use(self, key: bytes) -> bool:
        """Note a use; whether the key is listed."""
        with self._lock:
            size = self._sizes.pop(key, None)
            if size is not None:
                self._sizes[key] = size
            return size is not None

    def remove(self, key: bytes) -> bool:
        """Whether the key was listed."""
        with self._lock:
            size = self._sizes.pop(key, None)
            self._used -= size or 0
            return size is not None

    def sizes(self) -> Mapping[bytes, int]:
        """A copy."""
        with self._lock:
            return dict(self._sizes)

    def check_integrity(self) -> None:
        """The bytes add up and lie within the budget.

        Raises:
            AssertionError: they do not.
        """
        with self._lock:
            if self._used != sum(self._sizes.values()) or not self._used + self._reserved >= 0:
                raise AssertionError(f"{self._used} bytes are counted of {sum(self._sizes.values())}")
            if self._used + self._reserved > self.capacity_bytes:
                raise AssertionError(f"{self._used} and {self._reserved} bytes exceed {self.capacity_bytes}")
