"""States that are read layer by layer on their way out: from the engine's memory, or from a blob."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from services.blob.layout import StateHeader
from services.blob.planes import Plane
from services.blob.reader import StateReader
from services.worker.adapters.blob_transfer import outgoing_header, read_outgoing
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.served_model import ServedModel
from services.worker.engine.capture_rows import CaptureProgress
from services.worker.engine.transfer import OutgoingState

__all__ = ["BlobState", "CapturedState", "CapturingState", "EngineState", "ReadableState", "run_to_end"]

Result = TypeVar("Result")
_POLL_SECONDS = 0.002


async def run_to_end(threads: Executor, function: Callable[..., Result], *arguments: object) -> Result:
    """Run a function on a thread; a caller that is cancelled leaves when it has ended, since what it uses is given back then."""
    future = asyncio.get_running_loop().run_in_executor(threads, function, *arguments)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


@dataclass(frozen=True, slots=True)
class CapturedState:
    """A capture under way, and its pages held."""

    progress: CaptureProgress
    outgoing: OutgoingState

    def count_done(self) -> int:
        """Layers that may be read from now on; on the engine's thread. Raises OSError where no more will come."""
        if self.progress.is_given_up:
            raise OSError("its capture was given up")
        self.outgoing.follow()
        return self.progress.layers_done


class ReadableState(Protocol):
    """Close it, however reading ends. header: says what it is, not where its planes lie; layer_bytes: of one layer, about.

    is_being_computed: its layers are read as they are done.
    """

    header: StateHeader
    layer_bytes: int
    is_being_computed: bool

    def layers(self, from_layer: int) -> AsyncGenerator[list[Plane]]:
        """The planes of every layer from one on.

        Raises:
            BlobError: a byte is not what was stored.
            OSError: the medium does not answer.
        """
        ...

    async def close(self) -> None:
        """Give back what it holds."""
        ...


class EngineState:
    """A state of the engine's memory, which keeps its pages until it is closed."""

    is_being_computed = False

    def __init__(self, engine: EngineThread, served: ServedModel, outgoing: OutgoingState, threads: Executor) -> None:
        self.header = outgoing_header(served, outgoing, b"")
        self.layer_bytes = outgoing.state.plane_bytes // max(1, len(outgoing.layers))
        self._engine = engine
        self._outgoing = outgoing
        self._threads = threads

    async def layers(self, from_layer: int, to_layer: int | None = None) -> AsyncGenerator[list[Plane]]:
        """See `ReadableState`; all layers, or those up to one."""
        for layer in range(from_layer, self.header.num_layers if to_layer is None else to_layer):
            yield await run_to_end(self._threads, read_outgoing, self._outgoing, layer)

    async def close(self) -> None:
        """See `ReadableState`."""
        outgoing = self._outgoing
        self._engine.post(lambda _: outgoing.close())


class CapturingState:
    """A state that is being captured."""

    is_being_computed = True

    def __init__(self, engine: EngineThread, served: ServedModel, captured: CapturedState, threads: Executor) -> None:
        self._whole = EngineState(engine, served, captured.outgoing, threads)
        self.header = self._whole.header
        # Planes that are not there yet have no size; each weighs about as much as any.
        self.layer_bytes = served.state_bytes // max(1, self.header.num_layers)
        self._engine = engine
        self._captured = captured

    async def layers(self, from_layer: int) -> AsyncGenerator[list[Plane]]:
        """See `ReadableState`; raises OSError where the capture is given up."""
        first = from_layer
        while first < self.header.num_layers:
            done = await self._engine.call(lambda _: self._captured.count_done())
            if done <= first:
                await asyncio.sleep(_POLL_SECONDS)
                continue
            async with aclosing(self._whole.layers(first, done)) as layers:
                async for planes in layers:
                    yield planes
            first = done

    async def close(self) -> None:
        """See `ReadableState`."""
        await self._whole.close()


class BlobState:
    """A state of a lower tier."""

    is_being_computed = False

    def __init__(self, reader: StateReader, threads: Executor) -> None:
        self.header = reader.header
        self.layer_bytes = sum(plane.size for plane in reader.header.planes) // max(1, reader.header.num_layers)
        self._reader = reader
        self._threads = threads

    async def layers(self, from_layer: int) -> AsyncGenerator[list[Plane]]:
        """See `ReadableState`."""
        for layer in range(from_layer, self.header.num_layers):
            yield await run_to_end(self._threads, self._reader.read_layer, layer)

    async def close(self) -> None:
        """See `ReadableState`."""
