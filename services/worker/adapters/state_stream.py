"""A segment state as the messages of `Fetch`: header, planes layer by layer, receipt. Both directions stand here."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from blake3 import blake3
from hypic.v1 import worker_pb2

from services.blob.errors import DamagedBlobError
from services.blob.layout import CHECKSUM_BYTES, StateHeader, parse_header, write_state
from services.blob.planes import ITEM_BYTES, Plane
from services.common.rpc import CHUNK_BYTES
from services.worker.adapters.blob_transfer import check_blob
from services.worker.adapters.served_model import ServedModel
from services.worker.adapters.shared_memory import SharedAddress, map_shared
from services.worker.errors import WorkerError

__all__ = [
    "LayerReader",
    "SenderMemory",
    "UnseenMemoryError",
    "header_message",
    "layer_messages",
    "memory_message",
    "read_header",
    "receipt_message",
]


def header_message(header: StateHeader, key: bytes, is_being_computed: bool) -> worker_pb2.Chunk:
    """The first message; planes that the header describes are left out of it."""
    prefix, checksum = write_state(header, [])
    whole = bytes(prefix) + bytes(checksum)
    return worker_pb2.Chunk(key=key, header=whole, being_computed=is_being_computed)


def layer_messages(key: bytes, planes: Sequence[Plane]) -> Iterator[worker_pb2.Chunk]:
    """One layer. A plane has at least one message, for one without bytes has a checksum too."""
    size = sum(len(plane.data) for plane in planes)
    for index, plane in enumerate(planes):
        starts = range(0, max(len(plane.data), 1), CHUNK_BYTES)
        for start in starts:
            data = bytes(plane.data[start : start + CHUNK_BYTES])
            chunk = worker_pb2.Chunk(key=key, layer=plane.layer, plane=plane.name, offset=start, data=data)
            if start == 0:
                chunk.dtype = plane.dtype
                chunk.shape.extend(plane.shape)
                if index == 0:
                    chunk.layer_planes, chunk.layer_bytes = len(planes), size
            if start == starts[-1]:
                chunk.checksum = blake3(plane.data).digest()
            yield chunk


def memory_message(key: bytes, plane: Plane, address: SharedAddress, offset: int, checksum: bytes) -> worker_pb2.Chunk:
    """A whole plane that lies in memory; `checksum` is BLAKE3 of its bytes."""
    place = worker_pb2.SharedMemory(pid=address.pid, descriptor=address.descriptor, num_bytes=address.num_bytes)
    return worker_pb2.Chunk(
        key=key,
        layer=plane.layer,
        plane=plane.name,
        offset=offset,
        dtype=plane.dtype,
        shape=plane.shape,
        checksum=checksum,
        memory=place,
    )


def receipt_message(key: bytes, receipt: bytes) -> worker_pb2.Chunk:
    """The last message."""
    return worker_pb2.Chunk(key=key, receipt=receipt)


def read_header(chunk: worker_pb2.Chunk, served: ServedModel, token_ids: tuple[int, ...]) -> StateHeader:
    """The header of a state that is to be used here for these tokens.

    Raises:
        BlobError: it is damaged, or of another model, profile or segment.
    """
    prefix, checksum = chunk.header[:-CHECKSUM_BYTES], chunk.header[-CHECKSUM_BYTES:]
    header = parse_header(prefix, checksum, len(chunk.header))
    check_blob(served, header, token_ids)
    return header


class UnseenMemoryError(WorkerError):
    """What a sender shares cannot be mapped here; its messages can be read."""


class SenderMemory:
    """What a stream's sender shares, mapped when a message first names it, and again when it has grown."""

    def __init__(self) -> None:
        self._mapped: dict[int, memoryview] = {}

    def read(self, chunk: worker_pb2.Chunk, num_bytes: int) -> memoryview:
        """A plane's bytes, where they lie.

        Raises:
            DamagedBlobError: it does not lie inside.
            UnseenMemoryError: the memory cannot be seen from here.
        """
        place = chunk.memory
        mapped = self._mapped.get(place.descriptor)
        if mapped is None or len(mapped) < place.num_bytes:
            address = SharedAddress(place.pid, place.descriptor, place.num_bytes)
            try:
                mapped = self._mapped[place.descriptor] = memoryview(map_shared(address))
            except OSError as error:
                raise UnseenMemoryError(f"the sender's memory cannot be seen from here: {error}") from error
        if chunk.offset + num_bytes > len(mapped):
            raise DamagedBlobError(f"plane {chunk.plane} of layer {chunk.layer} lies outside of its memory")
        return mapped[chunk.offset : chunk.offset + num_bytes]


@dataclass(slots=True)
class LayerReader:
    """Puts the chunks of one layer together. num_bytes: of all its planes, as the first chunk says; memory: of the sender."""

    memory: SenderMemory
    layer: int
    num_planes: int
    num_bytes: int
    planes: list[Plane] = field(default_factory=list)
    _name: str = ""
    _dtype: str = ""
    _shape: tuple[int, ...] = ()
    _data: memoryview = field(default_factory=lambda: memoryview(b""))
    _filled: int = -1
    _read: int = 0

    @classmethod
    def begin(cls, memory: SenderMemory, layer: int, first: worker_pb2.Chunk, most_bytes: int) -> "LayerReader":
        """For a layer, by its first chunk.

        Raises:
            DamagedBlobError: it is another layer's, or promises nothing, or more than `most_bytes`.
        """
        if first.layer != layer or not first.layer_planes or first.layer_bytes > most_bytes:
            raise DamagedBlobError(
                f"layer {first.layer} of {first.layer_planes} planes and {first.layer_bytes} bytes came in place of layer"
                f" {layer} of at most {most_bytes}"
            )
        return cls(memory, layer, first.layer_planes, first.layer_bytes)

    @property
    def is_complete(self) -> bool:
        """Every plane is there."""
        return len(self.planes) == self.num_planes

    def add(self, chunk: worker_pb2.Chunk) -> None:
        """The next chunk.

        Raises:
            DamagedBlobError: it is out of order, or its plane is not what it says.
            UnseenMemoryError: it lies in memory that cannot be seen from here.
        """
        if chunk.dtype:
            self._begin_plane(chunk)
        end = self._take(chunk)
        if chunk.checksum:
            if end != len(self._data) or blake3(self._data).digest() != chunk.checksum:
                raise DamagedBlobError(f"plane {self._name} of layer {self.layer} does not fit its checksum")
            self.planes.append(Plane(self.layer, self._name, self._dtype, self._shape, self._data))
            self._filled = -1

    def _take(self, chunk: worker_pb2.Chunk) -> int:
        """Where the plane's bytes end that have come."""
        is_whole = chunk.HasField("memory")
        start = 0 if is_whole else chunk.offset
        end = len(self._data) if is_whole else start + len(chunk.data)
        if chunk.layer != self.layer or chunk.plane != self._name or start != self._filled or end > len(self._data):
            raise DamagedBlobError(f"chunk {start} of plane {chunk.plane} in layer {chunk.layer} is out of order")
        if not is_whole:
            self._data[start:end] = chunk.data
        self._filled = end
        return end

    def _begin_plane(self, chunk: worker_pb2.Chunk) -> None:
        size = math.prod(chunk.shape) * ITEM_BYTES.get(chunk.dtype, 0)
        self._read += size
        if self._filled != -1 or chunk.dtype not in ITEM_BYTES or self._read > self.num_bytes:
            raise DamagedBlobError(f"plane {chunk.plane} of layer {chunk.layer} does not fit what its layer promised")
        self._name, self._dtype, self._shape = chunk.plane, chunk.dtype, tuple(chunk.shape)
        self._data = self.memory.read(chunk, size) if chunk.HasField("memory") else memoryview(bytearray(size))
        self._filled = 0
