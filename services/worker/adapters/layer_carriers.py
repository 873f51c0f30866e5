"""How the planes of a layer leave this worker: inside the messages of `Fetch`, or through memory that the reader maps."""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import Protocol

from blake3 import blake3
from hypic.v1 import worker_pb2

from services.blob.planes import Plane
from services.worker.adapters.readable_states import run_to_end
from services.worker.adapters.shared_memory import ReaderProgress, SharedAddress, SharedMemory
from services.worker.adapters.state_stream import layer_messages, memory_message

__all__ = ["InlineCarrier", "LayerCarrier", "SharedCarrier", "choose_carrier"]

_POLL_SECONDS = 0.0005
# Planes start at addresses that tensors of any type may have.
_ALIGNMENT = 64


class LayerCarrier(Protocol):
    """Of one stream. layers_held: how many layers' bytes it keeps at once."""

    layers_held: int

    async def carry(self, key: bytes, planes: Sequence[Plane]) -> Iterable[worker_pb2.Chunk]:
        """The messages of the next layer, when there is room for it."""
        ...

    def close(self) -> None:
        """The stream has ended."""
        ...


class InlineCarrier:
    """The bytes are in the messages, and a reader that does not read holds the stream up."""

    layers_held = 1

    async def carry(self, key: bytes, planes: Sequence[Plane]) -> Iterable[worker_pb2.Chunk]:
        """See `LayerCarrier`."""
        return layer_messages(key, planes)

    def close(self) -> None:
        """See `LayerCarrier`."""


class SharedCarrier:
    """Two windows of memory in turn, each as large as the largest layer in it, and free again when that layer has been used."""

    layers_held = 2

    def __init__(self, progress: ReaderProgress, threads: Executor) -> None:
        self._progress = progress
        self._threads = threads
        self._windows = (SharedMemory(), SharedMemory())
        self._sent = 0

    async def carry(self, key: bytes, planes: Sequence[Plane]) -> Iterable[worker_pb2.Chunk]:
        """See `LayerCarrier`."""
        while self._sent - self._progress.layers_used >= len(self._windows):  # noqa: ASYNC110 # another process counts
            await asyncio.sleep(_POLL_SECONDS)
        window = self._windows[self._sent % len(self._windows)]
        self._sent += 1
        return await run_to_end(self._threads, _place, window, key, planes)

    def close(self) -> None:
        """See `LayerCarrier`."""
        for window in self._windows:
            window.close()


def choose_carrier(request: worker_pb2.FetchRequest, threads: Executor) -> LayerCarrier:
    """Shared memory where the reader offers a page that can be seen from here."""
    if not request.HasField("reader_page"):
        return InlineCarrier()
    page = request.reader_page
    try:
        address = SharedAddress(page.pid, page.descriptor, page.num_bytes)
        return SharedCarrier(ReaderProgress(address, request.reader_nonce), threads)
    except OSError:
        return InlineCarrier()


def _place(window: SharedMemory, key: bytes, planes: Sequence[Plane]) -> list[worker_pb2.Chunk]:
    offsets, end = [], 0
    for plane in planes:
        offsets.append(end)
        end += -(-len(plane.data) // _ALIGNMENT) * _ALIGNMENT
    window.reserve(end)
    for plane, offset in zip(planes, offsets, strict=True):
        window.write(offset, plane.data)
    size = sum(len(plane.data) for plane in planes)
    messages = []
    for plane, offset in zip(planes, offsets, strict=True):
        message = memory_message(key, plane, window.address, offset, blake3(plane.data).digest())
        if plane is planes[0]:
            message.layer_planes, message.layer_bytes = len(planes), size
        messages.append(message)
    return messages
