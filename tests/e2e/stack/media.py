"""What lies in a served worker's tiers, read and altered from outside the stack."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import redis
from blake3 import blake3

from services.blob.errors import BlobError
from services.blob.reader import BytesSource, StateReader

__all__ = ["DiskMedium", "HostMedium", "Medium", "PoolMedium", "RedisMedium", "can_alter_memory"]

# How safetensors' header begins, behind its length in eight bytes.
_JSON_START = re.compile(rb'\{"__metadata__":\{"hypic":"')
# Counted from that header's end.
_PLANE_END = re.compile(rb'"data_offsets":\[\d+,(\d+)\]')


class Medium(Protocol):
    """Where blobs lie."""

    @property
    def tier(self) -> str:
        """The tier's name in explanations."""
        ...

    @property
    def variables(self) -> Mapping[str, str]:
        """Settings that switch the tier on."""
        ...

    def blobs(self) -> dict[str, bytes]:
        """Every whole blob by a name of its own."""
        ...

    def alter(self, name: str, blob: bytes) -> None:
        """Put other bytes in a blob's place."""
        ...


class PoolMedium:
    """The worker's own pages and planes, which are no blobs."""

    tier = "worker"
    variables: Mapping[str, str] = {}

    def blobs(self) -> dict[str, bytes]:
        """See `Medium`: there are none."""
        return {}

    def alter(self, name: str, blob: bytes) -> None:
        """See `Medium`: there are none."""
        raise KeyError(name)


@dataclass(slots=True)
class DiskMedium:
    """Files of a folder."""

    folder: Path
    tier: str = "disk"

    @property
    def variables(self) -> Mapping[str, str]:
        """See `Medium`."""
        return {"HYPIC_WORKER_DISK_DIRECTORY": str(self.folder)}

    def blobs(self) -> dict[str, bytes]:
        """See `Medium`."""
        return {str(path): path.read_bytes() for path in self.folder.rglob("*.safetensors")}

    def alter(self, name: str, blob: bytes) -> None:
        """See `Medium`."""
        Path(name).write_bytes(blob)


@dataclass(slots=True)
class RedisMedium:
    """Values of a Redis."""

    url: str
    prefix: str
    tier: str = "redis"

    @property
    def variables(self) -> Mapping[str, str]:
        """See `Medium`."""
        return {"HYPIC_WORKER_REDIS_URL": self.url, "HYPIC_WORKER_REDIS_PREFIX": self.prefix}

    def blobs(self) -> dict[str, bytes]:
        """See `Medium`."""
        with redis.Redis.from_url(self.url) as client:
            names = client.keys(f"{self.prefix}:blob:*")
            return {name.decode(): client.get(name) for name in names}

    def alter(self, name: str, blob: bytes) -> None:
        """See `Medium`."""
        with redis.Redis.from_url(self.url) as client:
            client.set(name, blob)


@dataclass(slots=True)
class HostMedium:
    """Blobs in the memory of the worker's process. What is missing of other bytes becomes zero, as in an unfinished copy."""

    worker_pid: Callable[[], int]
    tier: str = "host"

    @property
    def variables(self) -> Mapping[str, str]:
        """See `Medium`."""
        return {"HYPIC_WORKER_HOST_BYTES": str(64 << 20)}

    def blobs(self) -> dict[str, bytes]:
        """See `Medium`. What is freed may still be there."""
        return {name: blob for name, (_, blob) in self._found().items()}

    def alter(self, name: str, blob: bytes) -> None:
        """See `Medium`. Every place that holds the blob is altered."""
        places, before = self._found()[name]
        assert len(before) >= len(blob)
        with open(f"/proc/{self.worker_pid()}/mem", "r+b", buffering=0) as memory:
            for place in places:
                memory.seek(place)
                assert memory.write(blob.ljust(len(before), b"\0")) == len(before)

    def _found(self) -> dict[str, tuple[list[int], bytes]]:
        """Places and bytes of every whole blob, by its checksum."""
        found: dict[str, tuple[list[int], bytes]] = {}
        pid = self.worker_pid()
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for start, size in _writable_regions(pid):
                memory.seek(start)
                try:
                    region = memoryview(memory.read(size))
                except OSError:
                    # Given back since its place was read.
                    continue
                for match in _JSON_START.finditer(region):
                    place = max(match.start() - 8, 0)
                    blob = _whole_blob(region[place:])
                    if blob is not None:
                        found.setdefault(blake3(blob).hexdigest(), ([], blob))[0].append(start + place)
        return found


def _writable_regions(pid: int) -> list[tuple[int, int]]:
    """Start and size of every part of a process's memory that it may write and no file stands behind."""
    regions = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        bounds, access, _, _, inode, *_ = line.split(maxsplit=5)
        if access.startswith("rw") and inode == "0":
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            regions.append((start, end - start))
    return regions


def _whole_blob(memory: memoryview) -> bytes | None:
    """The blob at the start of these bytes, if all of it is there."""
    prefix = 8 + int.from_bytes(memory[:8], "little")
    ends = _PLANE_END.findall(bytes(memory[:prefix]))
    blob = bytes(memory[: prefix + max(map(int, ends), default=0)])
    try:
        list(StateReader(BytesSource(blob)).layers())
    except BlobError:
        return None
    return blob


def can_alter_memory(pid: int) -> bool:
    """Whether this machine lets a test write into a process that it has started."""
    try:
        open(f"/proc/{pid}/mem", "r+b", buffering=0).close()
    except PermissionError:
        return False
    return True
