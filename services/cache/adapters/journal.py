"""The journal of an in-memory directory: a file of checked lines, on the medium before a call returns.

```
<checksum> {"version": 1, "life": …, "secret": …}
<checksum> {"registered": …}
```

A line's checksum is BLAKE3 of its JSON. The file grows by what changes, and is written anew, and renamed into its place,
when it has become much longer than what it amounts to. Bytes behind the last whole line are a write that nobody was told
of, and are cut off; any other damage means that changes are missing, and begins another life.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3
from typing_extensions import override

from services.cache.adapters.journal_lines import change_of, fields_of
from services.cache.domain.changes import Change, Journal
from services.cache.domain.errors import DirectoryUnavailableError, JournalError
from services.common.files import open_private, own_file, sync_directory, write_synchronised
from services.common.telemetry import get_logger

__all__ = ["JournalFile"]

_VERSION = 1
_CHECKSUM_BYTES = 8
# So many lines, or twice what is still of use, before the file is written anew.
_LEAST_LINES = 10_000


class JournalFile(Journal):
    """One process owns the file at a time; `secret` is that of the service, under which scopes were derived.

    Raises:
        JournalError: the file cannot be used; the message names the remedy.
    """

    def __init__(self, path: Path, secret: bytes) -> None:
        self.life = secrets.token_hex(8)
        self._path = path
        self._secret_name = blake3(secret, derive_key_context="hypic cache 1 journal").hexdigest(length=8)
        self._file: int | None = None
        self._num_lines = self._most_lines = 0
        # What the file holds is not certain, or not all.
        self._is_behind = False
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = own_file(path.with_name(f"{path.name}.lock"))
        except BlockingIOError as error:
            raise JournalError(f"{path} is used by a cache service that runs; name another file") from error
        except OSError as error:
            raise JournalError(f"{error}; name a file in a folder that may be written") from error
        try:
            self._recalled = self._read() if path.exists() else []
            self._rewrite(self._recalled)
        except (JournalError, OSError) as error:
            os.close(self._lock)
            raise JournalError(str(error)) from error
        # Writes go one at a time, in the order in which they were asked for.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")

    @override
    def recall(self) -> Iterable[Change]:
        recalled, self._recalled = self._recalled, []
        return recalled

    @override
    async def write(self, changes: Sequence[Change], everything: Callable[[], Sequence[Change]]) -> None:
        if not changes and not self._is_behind:
            return
        if self._is_behind or self._num_lines + len(changes) > self._most_lines:
            work = self._thread.submit(self._attempt, self._rewrite, everything())
        else:
            work = self._thread.submit(self._attempt, self._append, changes)
        try:
            await asyncio.wrap_future(work)
        except OSError as error:
            get_logger().error("journal_failed", path=str(self._path), error=str(error))
            raise DirectoryUnavailableError(f"the directory's journal cannot be written: {error}") from error

    @override
    def close(self) -> None:
        self._thread.shutdown()
        self._let_go()
        os.close(self._lock)

    def _attempt(self, write: Callable[[Sequence[Change]], None], changes: Sequence[Change]) -> None:
        try:
            write(changes)
        except OSError:
            self._is_behind = True
            raise

    def _append(self, changes: Sequence[Change]) -> None:
        assert self._file is not None
        write_synchronised(self._file, (_line(fields_of(change)) for change in changes))
        self._num_lines += len(changes)

    def _rewrite(self, changes: Sequence[Change]) -> None:
        header = {"version": _VERSION, "life": self.life, "secret": self._secret_name}
        fresh = self._path.with_name(f"{self._path.name}.new")
        file = open_private(fresh)
        try:
            write_synchronised(file, [b"".join([_line(header), *(_line(fields_of(change)) for change in changes)])])
            fresh.rename(self._path)
            sync_directory(self._path.parent)
        except OSError:
            os.close(file)
            raise
        self._let_go()
        self._file = file
        self._num_lines = len(changes)
        self._most_lines = max(_LEAST_LINES, 2 * len(changes))
        self._is_behind = False

    def _let_go(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _read(self) -> list[Change]:
        """What the file holds; nothing, in another life, where some of it may be missing."""
        header, *lines = self._path.read_bytes().split(b"\n")
        try:
            described = _parse(header)
            # Behind the last line end stands what was never finished.
            changes = [change_of(_parse(line)) for line in lines[:-1]]
            version, secret_name, life = described["version"], described["secret"], str(described["life"])
        except (ValueError, KeyError, TypeError) as error:
            damaged = self._path.with_name(f"{self._path.name}.damaged")
            self._path.rename(damaged)
            get_logger().error("journal_damaged", kept_as=str(damaged), error=str(error))
            return []
        if version != _VERSION:
            raise JournalError(f"{self._path} has version {version}, not {_VERSION}; name another file")
        if secret_name != self._secret_name:
            raise JournalError(
                f"{self._path} was written under another HYPIC_CACHE_SECRET; set that one, or name another file"
            )
        self.life = life
        return changes


def _line(fields: Mapping[str, object]) -> bytes:
    text = json.dumps(fields, separators=(",", ":")).encode()
    return b"%b %b\n" % (_checksum(text), text)


def _parse(line: bytes) -> Mapping[str, Any]:
    """Raises `ValueError` where it is not as it was written."""
    checksum, _, text = line.partition(b" ")
    if checksum != _checksum(text):
        raise ValueError(f"a line of {len(line)} bytes does not fit its checksum")
    fields: Mapping[str, Any] = json.loads(text)
    return fields


def _checksum(text: bytes) -> bytes:
    return blake3(text).hexdigest(length=_CHECKSUM_BYTES).encode()
