"""States of other workers, pulled by `Fetch`: layer by layer, every plane against its checksum, bytes in flight bounded."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from hypic.v1 import worker_pb2, worker_pb2_grpc

from services.blob.errors import DamagedBlobError
from services.blob.layout import StateHeader
from services.blob.planes import Plane
from services.common.errors import DeadlineError, UnavailableError, error_from_status
from services.common.rpc import create_channel, request_metadata
from services.worker.adapters.byte_budget import ByteBudget
from services.worker.adapters.served_model import ServedModel
from services.worker.adapters.shared_memory import ReaderPage
from services.worker.adapters.state_stream import LayerReader, SenderMemory, UnseenMemoryError, read_header
from services.worker.tiers.speeds import OTHER_HOST, SAME_HOST

__all__ = ["FetchLimits", "PeerState", "PeerStates", "Source"]

# A layer's bytes are allocated by what its sender says; no layer of any model is as large.
_MOST_LAYER_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class Source:
    """A worker that holds a state, and where it is reached."""

    worker_id: str
    address: str


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """wait_seconds: for a state that is being computed; stall_seconds: between two messages; seconds: for all of it."""

    wait_seconds: float
    stall_seconds: float
    seconds: float


class PeerStates:
    """Channels to other workers, one an address. own_address: where this worker is reached itself; shares_memory: offer those of
    its host to give planes through memory.
    """

    def __init__(
        self,
        served: ServedModel,
        own_address: str,
        budget: ByteBudget,
        shares_memory: bool,
        connect: Callable[[str], grpc.aio.Channel] = create_channel,
    ) -> None:
        self._connect = connect
        self._served = served
        self._own_host = _host(own_address)
        self._budget = budget
        self._shares_memory = shares_memory and hasattr(os, "memfd_create")
        # Whose memory cannot be seen from here, though this worker's can from there.
        self._unseen: set[str] = set()
        self._channels: dict[str, grpc.aio.Channel] = {}

    def way(self, source: Source) -> str:
        """The tier that another worker's memory is for this one: on the same host, or on another."""
        return SAME_HOST if _host(source.address) == self._own_host else OTHER_HOST

    @asynccontextmanager
    async def open(
        self, source: Source, key: bytes, token_ids: tuple[int, ...], from_layer: int, limits: FetchLimits
    ) -> "AsyncIterator[PeerState]":
        """A state on its way, its header read. Leaving the context ends the stream.

        Raises:
            BlobError: what comes is of no use here.
            HypicError: the worker cannot be reached, does not hold the state, or stalls.
        """
        channel = self._channel(source)
        request = worker_pb2.FetchRequest(key=key, from_layer=from_layer, wait_seconds=limits.wait_seconds)
        page = self._offer_page(source, request)
        call = worker_pb2_grpc.WorkerServiceStub(channel).Fetch(
            request, timeout=limits.seconds, metadata=request_metadata()
        )
        messages = _Messages(call, limits.stall_seconds)
        try:
            first = await messages.read(limits.wait_seconds)
            header = read_header(first, self._served, token_ids)
            if first.being_computed:
                messages.stall_seconds += limits.wait_seconds
            yield PeerState(header, first.being_computed, messages, self._budget, page)
        except UnseenMemoryError:
            self._unseen.add(source.address)
            raise
        finally:
            call.cancel()
            if page is not None:
                page.close()

    async def connect(self, source: Source, seconds: float) -> None:
        """Wait for a connection, which says nothing of how fast states come by it.

        Raises:
            UnavailableError: there is none in time.
        """
        channel = self._channel(source)
        try:
            async with asyncio.timeout(seconds):
                state = channel.get_state(try_to_connect=True)
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise UnavailableError(f"worker {source.worker_id} at {source.address} cannot be reached")
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise UnavailableError(f"worker {source.worker_id} at {source.address} cannot be reached") from None

    def _offer_page(self, source: Source, request: worker_pb2.FetchRequest) -> ReaderPage | None:
        if not self._shares_memory or source.address in self._unseen or self.way(source) != SAME_HOST:
            return None
        page = ReaderPage()
        at = page.address
        request.reader_page.pid, request.reader_page.descriptor = at.pid, at.descriptor
        request.reader_page.num_bytes, request.reader_nonce = at.num_bytes, page.nonce
        return page

    def _channel(self, source: Source) -> grpc.aio.Channel:
        if source.address not in self._channels:
            self._channels[source.address] = self._connect(source.address)
        return self._channels[source.address]

    async def close(self) -> None:
        """Give up all channels."""
        for channel in self._channels.values():
            await channel.close()


class PeerState:
    """See `PeerStates.open`. is_being_computed: layers are sent as they are done."""

    def __init__(
        self,
        header: StateHeader,
        is_being_computed: bool,
        messages: "_Messages",
        budget: ByteBudget,
        page: ReaderPage | None,
    ) -> None:
        self.header = header
        self.is_being_computed = is_being_computed
        self.num_bytes = 0
        self._messages = messages
        self._budget = budget
        self._page = page
        self._memory = SenderMemory()

    async def layers(self, from_layer: int) -> AsyncGenerator[list[Plane]]:
        """The planes of every layer that was asked for, in order; the next one is read when this one has been used.

        Raises:
            BlobError: a byte differs from what was sent, or something else than was promised came.
            HypicError: the stream broke or stalled.
        """
        for layer in range(from_layer, self.header.num_layers):
            first = await self._messages.read()
            reader = LayerReader.begin(self._memory, layer, first, _MOST_LAYER_BYTES)
            async with self._budget.held(reader.num_bytes):
                reader.add(first)
                while not reader.is_complete:
                    reader.add(await self._messages.read())
                self.num_bytes += reader.num_bytes
                yield reader.planes
            if self._page is not None:
                self._page.note_used(layer - from_layer + 1)

    async def read_receipt(self) -> bytes:
        """The last message: the directory's receipt of the sender's copy, empty where that is not published."""
        return (await self._messages.read()).receipt


class _Messages:
    def __init__(self, call: "grpc.aio.UnaryStreamCall[Any, worker_pb2.Chunk]", stall_seconds: float) -> None:
        self._call = call
        self.stall_seconds = stall_seconds

    async def read(self, more_seconds: float = 0.0) -> worker_pb2.Chunk:
        """The next one."""
        try:
            async with asyncio.timeout(self.stall_seconds + more_seconds):
                chunk = await self._call.read()
        except TimeoutError:
            raise DeadlineError(f"the state's stream stalled for {self.stall_seconds + more_seconds:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        if not isinstance(chunk, worker_pb2.Chunk):
            raise DamagedBlobError("the state's stream ended early")
        return chunk


def _host(address: str) -> str:
    return address.rpartition(":")[0]
