"""Memory that another process of this host may map, without a name that outlives its owner.

It is an anonymous file, found as `/proc/PID/fd/N` by who is of the same user and sees the owner's process: workers of one machine
or of one pod. Linux alone has it.
"""

import mmap
import os
import secrets
import stat
from dataclasses import dataclass

__all__ = ["ReaderPage", "ReaderProgress", "SharedAddress", "SharedMemory", "map_shared"]

_NONCE_BYTES = 16
_COUNT_BYTES = 8
_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class SharedAddress:
    """Where memory is found: the owner's process, its file descriptor there, and how many bytes it has."""

    pid: int
    descriptor: int
    num_bytes: int


class SharedMemory:
    """Memory of this process. Gone with its owner, and with the last one who has mapped it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("hypic", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None
        self.address = SharedAddress(os.getpid(), self._file, 0)

    def reserve(self, num_bytes: int) -> None:
        """Make it at least so large; what stands in it stays.

        Raises:
            OSError: there is not so much memory.
        """
        if num_bytes <= self.address.num_bytes:
            return
        os.posix_fallocate(self._file, 0, num_bytes)
        if self._map is not None:
            self._map.close()
        self._map = mmap.mmap(self._file, num_bytes)
        self.address = SharedAddress(self.address.pid, self._file, num_bytes)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Put bytes at a place that has been reserved."""
        if self._map is None:
            raise ValueError("nothing has been reserved")
        self._map[offset : offset + len(data)] = data

    def close(self) -> None:
        """Give it up; who has mapped it keeps it."""
        if self._map is not None:
            self._map.close()
        os.close(self._file)


def map_shared(address: SharedAddress) -> mmap.mmap:
    """Another process's memory, to read; what is written to it here stays here.

    Raises:
        OSError: it cannot be seen from here, or is not what the address says.
    """
    # An address comes from outside: it must not make us wait for a pipe, nor open what only looks like memory.
    file = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size < address.num_bytes or address.num_bytes < 1:
            raise OSError(f"descriptor {address.descriptor} of process {address.pid} is no memory of its size")
        return mmap.mmap(file, address.num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(file)


class ReaderPage:
    """The page in which a reader says how many layers it has used, with a number that proves that both see the same one."""

    def __init__(self) -> None:
        self._memory = SharedMemory()
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self._memory.reserve(_PAGE_BYTES)
        self._memory.write(0, self.nonce)

    @property
    def address(self) -> SharedAddress:
        """Where the sender finds it."""
        return self._memory.address

    def note_used(self, num_layers: int) -> None:
        """So many layers have been used in all."""
        self._memory.write(_NONCE_BYTES, num_layers.to_bytes(_COUNT_BYTES, "little"))

    def close(self) -> None:
        """Give it up."""
        self._memory.close()


class ReaderProgress:
    """A reader's page as its sender sees it.

    Raises:
        OSError: it cannot be seen from here, or is another one.
    """

    def __init__(self, address: SharedAddress, nonce: bytes) -> None:
        self._map = map_shared(address)
        if len(nonce) != _NONCE_BYTES or self._map[:_NONCE_BYTES] != nonce:
            raise OSError("the reader's page is another one")

    @property
    def layers_used(self) -> int:
        """So far."""
        return int.from_bytes(self._map[_NONCE_BYTES : _NONCE_BYTES + _COUNT_BYTES], "little")
