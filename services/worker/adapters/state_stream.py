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

__all__ = ["LayerReader", "header_message", "layer_messages", "read_header", "receipt_message"]


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


@dataclass(slots=True)
class LayerReader:
    """Puts the chunks of one layer together. num_bytes: of all its planes, as the first chunk says."""

    layer: int
    num_planes: int
    num_bytes: int
    planes: list[Plane] = field(default_factory=list)
    _name: str = ""
    _dtype: str = ""
    _shape: tuple[int, ...] = ()
    _data: bytearray = field(default_factory=bytearray)
    _filled: int = -1
    _read: int = 0

    @classmethod
    def begin(cls, layer: int, first: worker_pb2.Chunk, most_bytes: int) -> "LayerReader":
        """For a layer, by its first chunk.

        Raises:
            DamagedBlobError: it is another layer's, or promises nothing, or more than `most_bytes`.
        """
        if first.layer != layer or not first.layer_planes or first.layer_bytes > most_bytes:
            raise DamagedBlobError(
                f"layer {first.layer} of {first.layer_planes} planes and {first.layer_bytes} bytes came in place of layer"
                f" {layer} of at most {most_bytes}"
            )
        return cls(layer, first.layer_planes, first.layer_bytes)

    @property
    def is_complete(self) -> bool:
        """Every plane is there."""
        return len(self.planes) == self.num_planes

    def add(self, chunk: worker_pb2.Chunk) -> None:
        """The next chunk.

        Raises:
            DamagedBlobError: it is out of order, or its plane is not what it says.
        """
        if chunk.dtype:
            self._begin_plane(chunk)
        end = self._filled + len(chunk.data)
        if (
            chunk.layer != self.layer
            or chunk.plane != self._name
            or chunk.offset != self._filled
            or end > len(self._data)
        ):
            raise DamagedBlobError(
                f"chunk {chunk.offset} of plane {chunk.plane} in layer {chunk.layer} is out of order"
            )
        self._data[self._filled : end] = chunk.data
        self._filled = end
        if chunk.checksum:
            if end != len(self._data) or blake3(self._data).digest() != chunk.checksum:
                raise DamagedBlobError(f"plane {self._name} of layer {self.layer} does not fit its checksum")
            self.planes.append(Plane(self.layer, self._name, self._dtype, self._shape, memoryview(self._data)))
            self._filled = -1

    def _begin_plane(self, chunk: worker_pb2.Chunk) -> None:
        size = math.prod(chunk.shape) * ITEM_BYTES.get(chunk.dtype, 0)
        self._read += size
        if self._filled != -1 or chunk.dtype not in ITEM_BYTES or self._read > self.num_bytes:
            raise DamagedBlobError(f"plane {chunk.plane} of layer {chunk.layer} does not fit what its layer promised")
        self._name, self._dtype, self._shape = chunk.plane, chunk.dtype, tuple(chunk.shape)
        self._data, self._filled = bytearray(size), 0
