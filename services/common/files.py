"""Files that outlive a process, however it ends: owned by one, private, and on the medium before anybody is told."""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["open_private", "own_file", "sync_directory", "write_synchronised"]


def own_file(path: Path) -> int:
    """Lock a file until its descriptor is closed or the process ends; the descriptor.

    Raises:
        BlockingIOError: another process has it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def open_private(path: Path) -> int:
    """A new or emptied file that is written at its end, and that nobody else may read; its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)


def write_synchronised(descriptor: int, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write all bytes onto the medium: a name must never come to stand for what a power cut takes away.

    Raises:
        OSError: they cannot be written; how many were is not certain.
    """
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def sync_directory(directory: Path) -> None:
    """Let the names of a directory outlive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
