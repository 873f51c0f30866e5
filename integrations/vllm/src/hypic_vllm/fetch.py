"""Takes one decode state from a worker: header and planes, every plane against its checksum."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import grpc
from blake3 import blake3
from hypic.v1 import worker_pb2, worker_pb2_grpc

from services.blob.errors import BlobError, DamagedBlobError, ForeignBlobError
from services.blob.layout import CHECKSUM_BYTES, StateHeader, parse_header
from services.blob.planes import ITEM_BYTES, Plane

__all__ = ["DecodeState", "FetchError", "Taking", "Wanted", "read_state"]


class FetchError(Exception):
    """The state did not come, or is not the one that was wanted; vLLM computes the prompt itself."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """handle: of the state; token_ids: of which it must be; model_revision: of the model that must have computed it."""

    handle: bytes
    token_ids: tuple[int, ...]
    model_revision: str


@dataclass(frozen=True, slots=True)
class DecodeState:
    """layers: what every layer keeps, `linear` or `attention`; planes: of every layer, by name."""

    layers: tuple[str, ...]
    planes: tuple[Mapping[str, Plane], ...]


class Taking:
    """One call of `Take`; `run` blocks, `cancel` may come from another thread at any time."""

    def __init__(self, channel: grpc.Channel, wanted: Wanted, limit_bytes: int, call_seconds: float) -> None:
        self._wanted = wanted
        self._limit_bytes = limit_bytes
        request = worker_pb2.TakeRequest(handle=wanted.handle)
        self._call = worker_pb2_grpc.WorkerServiceStub(channel).Take(request, timeout=call_seconds)

    def run(self) -> DecodeState:
        """The whole state, of at most so many bytes.

        Raises:
            FetchError: it does not come, or is not the one that is wanted.
        """
        try:
            return read_state(iter(self._call), self._wanted, self._limit_bytes)
        except grpc.RpcError as error:
            raise FetchError(f"the worker did not give the state: {self._call.details()}") from error
        except BlobError as error:
            raise FetchError(f"the state cannot be used: {error}") from error
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        """End the call: the worker frees the state."""
        self._call.cancel()


def read_state(chunks: Iterator[worker_pb2.Chunk], wanted: Wanted, limit_bytes: int) -> DecodeState:
    """Put the messages of a state together.

    Raises:
        BlobError: they are not those of the wanted state.
    """
    header = _read_header(next(chunks, worker_pb2.Chunk()), wanted)
    layers: list[dict[str, Plane]] = [{} for _ in header.layers]
    read = 0
    for plane in _planes(chunks, limit_bytes):
        read += len(plane.data)
        if read > limit_bytes:
            raise DamagedBlobError(f"it is larger than {limit_bytes} bytes")
        if plane.layer >= len(layers) or plane.name in layers[plane.layer]:
            raise DamagedBlobError(f"plane {plane.name} of layer {plane.layer} stands where none should")
        layers[plane.layer][plane.name] = plane
    for index, (kind, planes) in enumerate(zip(header.layers, layers, strict=True)):
        if set(planes) != ({"state", "tail"} if kind == "linear" else {"keys", "values"}):
            raise DamagedBlobError(f"layer {index} came as {', '.join(planes) or 'nothing'}")
    return DecodeState(header.layers, tuple(layers))


def _read_header(chunk: worker_pb2.Chunk, wanted: Wanted) -> StateHeader:
    prefix, checksum = chunk.header[:-CHECKSUM_BYTES], chunk.header[-CHECKSUM_BYTES:]
    header = parse_header(prefix, checksum, len(chunk.header))
    if header.model_revision != wanted.model_revision:
        raise ForeignBlobError(f"it is of model {header.model_revision}, this engine serves {wanted.model_revision}")
    header.check_tokens(wanted.token_ids)
    return header


def _planes(chunks: Iterator[worker_pb2.Chunk], limit_bytes: int) -> Iterator[Plane]:
    """Whole planes from chunks in order."""
    for first in chunks:
        size = math.prod(first.shape) * ITEM_BYTES.get(first.dtype, 0)
        if not 0 < size <= limit_bytes or first.offset:
            raise DamagedBlobError(f"plane {first.plane} of layer {first.layer} does not begin as a plane does")
        data, chunk, filled = bytearray(size), first, 0
        while True:
            end = filled + len(chunk.data)
            if (chunk.layer, chunk.plane, chunk.offset) != (first.layer, first.plane, filled) or end > size:
                raise DamagedBlobError(f"a chunk of plane {first.plane} of layer {first.layer} is out of order")
            data[filled:end] = chunk.data
            filled = end
            if chunk.checksum:
                break
            if (after := next(chunks, None)) is None:
                raise DamagedBlobError(f"plane {first.plane} of layer {first.layer} ended early")
            chunk = after
        if filled != size or blake3(data).digest() != chunk.checksum:
            raise DamagedBlobError(f"plane {first.plane} of layer {first.layer} does not fit its checksum")
        yield Plane(first.layer, first.plane, first.dtype, tuple(first.shape), data)
