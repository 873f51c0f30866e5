"""One state's way into the room that the engine has reserved: from a lower tier of this worker, or from another worker."""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from services.blob.errors import DamagedBlobError, ForeignBlobError
from services.blob.reader import StateReader
from services.common.errors import DeadlineError, HypicError, NotFoundError
from services.common.telemetry import get_logger
from services.worker.adapters.blob_tiers import BlobTiers
from services.worker.adapters.blob_transfer import check_blob, write_incoming
from services.worker.adapters.peer_states import FetchLimits, PeerStates, Source
from services.worker.adapters.readable_states import run_to_end
from services.worker.adapters.served_model import ServedModel
from services.worker.adapters.state_stream import UnseenMemoryError
from services.worker.engine.transfer import IncomingState

__all__ = ["Move", "Moved", "PeerMove", "TierMove"]


@dataclass(frozen=True, slots=True)
class Moved:
    """A state that has come. latency_seconds: until it was open, seconds: behind that.

    is_measure: these say how fast the way is; they do not where layers were sent as they were computed. source: the worker that
    it came from, with the receipt of that one's copy.
    """

    latency_seconds: float
    seconds: float
    num_bytes: int
    is_measure: bool = True
    source: str = ""
    receipt: bytes = b""


class Move(Protocol):
    """way: the tier, of this worker or that of other workers' memory."""

    way: str

    async def run(self, key: bytes, incoming: IncomingState, on_layer: Callable[[], None]) -> Moved:
        """Bring the layers that have not come yet, one after the other.

        Raises whatever goes wrong; a caller that is cancelled leaves when nothing writes any more.
        """
        ...

    async def give_up(self, key: bytes, error: Exception) -> str:
        """Behind a move that failed: why, for the reply."""
        ...


@dataclass(slots=True)
class TierMove:
    """See `Move`."""

    way: str
    served: ServedModel
    tiers: BlobTiers
    threads: Executor

    async def run(self, key: bytes, incoming: IncomingState, on_layer: Callable[[], None]) -> Moved:
        """See `Move`."""
        began, first = time.monotonic(), incoming.layers_present
        reader = await run_to_end(self.threads, self.tiers.open, self.way, key)
        check_blob(self.served, reader.header, incoming.token_ids)
        latency = time.monotonic() - began
        for layer in range(first, incoming.num_layers):
            await run_to_end(self.threads, _load_layer, reader, layer, incoming)
            on_layer()
        num_bytes = sum(plane.size for plane in reader.header.planes if plane.layer >= first)
        return Moved(latency, time.monotonic() - began - latency, num_bytes)

    async def give_up(self, key: bytes, error: Exception) -> str:
        """See `Move`; a blob that is of no use to anybody is removed."""
        return await run_to_end(self.threads, self.tiers.give_up, self.way, key, error)


@dataclass(slots=True)
class PeerMove:
    """See `Move`."""

    way: str
    source: Source
    limits: FetchLimits
    peers: PeerStates
    threads: Executor

    async def run(self, key: bytes, incoming: IncomingState, on_layer: Callable[[], None]) -> Moved:
        """See `Move`."""
        await self.peers.connect(self.source, self.limits.stall_seconds)
        try:
            return await self._bring(key, incoming, on_layer)
        except UnseenMemoryError:
            # It is not offered again.
            return await self._bring(key, incoming, on_layer)

    async def _bring(self, key: bytes, incoming: IncomingState, on_layer: Callable[[], None]) -> Moved:
        began, first = time.monotonic(), incoming.layers_present
        async with self.peers.open(self.source, key, incoming.token_ids, first, self.limits) as state:
            latency = time.monotonic() - began
            async with aclosing(state.layers(first)) as layers:
                async for planes in layers:
                    await run_to_end(self.threads, write_incoming, incoming, planes[0].layer, planes)
                    on_layer()
            seconds = time.monotonic() - began - latency
            receipt = await state.read_receipt()
        return Moved(latency, seconds, state.num_bytes, not state.is_being_computed, self.source.worker_id, receipt)

    async def give_up(self, key: bytes, error: Exception) -> str:
        """See `Move`."""
        get_logger().warning(
            "state_not_fetched", worker_id=self.source.worker_id, key=key.hex(), error=str(error) or repr(error)
        )
        match error:
            case NotFoundError():
                return "blob_missing"
            case DamagedBlobError():
                return "blob_damaged"
            case ForeignBlobError():
                return "blob_foreign"
            case DeadlineError():
                return "fetch_timeout"
            case HypicError():
                return "worker_unreachable"
            case _:
                return "fetch_failed"


def _load_layer(reader: StateReader, layer: int, incoming: IncomingState) -> None:
    write_incoming(incoming, layer, reader.read_layer(layer))
