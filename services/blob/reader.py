"""Reading a blob: its header first, then planes layer by layer, every byte against its checksum."""

from collections.abc import Iterator
from typing import Protocol

from blake3 import blake3

from services.blob.errors import DamagedBlobError
from services.blob.layout import CHECKSUM_BYTES, StateHeader, parse_header
from services.blob.planes import Buffer, Plane

__all__ = ["BlobSource", "BytesSource", "StateReader"]


class BlobSource(Protocol):
    """Where a blob's bytes lie."""

    @property
    def size(self) -> int:
        """Bytes that are there."""
        ...

    def read(self, offset: int, size: int) -> Buffer:
        """So many bytes from an offset on; fewer where the blob ends.

        Raises:
            OSError: they cannot be read.
        """
        ...


class BytesSource:
    """A blob in memory; what is read of it is not copied."""

    def __init__(self, blob: Buffer) -> None:
        self._blob = memoryview(blob)

    @property
    def size(self) -> int:
        """See `BlobSource`."""
        return len(self._blob)

    def read(self, offset: int, size: int) -> memoryview:
        """See `BlobSource`."""
        return self._blob[offset : offset + size]


class StateReader:
    """One blob, opened: its header is whole, of this layout version, and says all bytes that are there.

    Raises:
        DamagedBlobError: the header is damaged, or bytes are missing.
        ForeignBlobError: another layout version.
        OSError: the source cannot be read.
    """

    def __init__(self, source: BlobSource) -> None:
        self._source = source
        length = 8 + int.from_bytes(source.read(0, 8), "little")
        if length + CHECKSUM_BYTES > source.size:
            raise DamagedBlobError(f"a header of {length} bytes does not fit a blob of {source.size}")
        self.prefix = bytes(source.read(0, length))
        self.header: StateHeader = parse_header(self.prefix, bytes(source.read(length, CHECKSUM_BYTES)), source.size)

    def read_layer(self, layer: int) -> list[Plane]:
        """The planes of one layer, by one read.

        Raises:
            DamagedBlobError: a byte differs or is missing; the message names the plane.
            OSError: the source cannot be read.
        """
        headers = self.header.of_layer(layer)
        if not headers:
            return []
        start = headers[0].offset
        read = self._source.read(start, headers[-1].offset + headers[-1].size - start)
        planes = []
        for own in headers:
            data = read[own.offset - start : own.offset - start + own.size]
            if blake3(data).digest() != own.checksum:
                raise DamagedBlobError(f"plane {own.name} of layer {layer} does not fit its checksum")
            planes.append(Plane(layer, own.name, own.dtype, own.shape, data))
        return planes

    def layers(self, from_layer: int = 0) -> Iterator[list[Plane]]:
        """The planes of every layer from one on. Raises as `read_layer` does."""
        return (self.read_layer(layer) for layer in range(from_layer, self.header.num_layers))
