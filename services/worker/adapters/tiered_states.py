"""Segment states of this worker, wherever they lie: down into tiers behind a publish, out to whoever reads them."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from services.blob.errors import BlobError
from services.blob.planes import Buffer
from services.common.telemetry import get_logger
from services.worker.adapters.blob_tiers import BlobTiers, KeptState
from services.worker.adapters.blob_transfer import write_blob
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.readable_states import (
    BlobState,
    CapturedState,
    CapturingState,
    EngineState,
    ReadableState,
)
from services.worker.adapters.served_model import ServedModel
from services.worker.engine.loop import Engine
from services.worker.engine.states import SegmentState
from services.worker.engine.transfer import OutgoingState
from services.worker.tiers.speeds import FetchPolicy

__all__ = ["TieredStates"]

Result = TypeVar("Result")
# Moves of bytes that run at once: one down, and a few prompts' up.
_THREADS = 4
_DELETE_SECONDS = 2.0


class TieredStates:
    """Lives on the event loop; bytes move on threads beside it, and the engine's thread only begins and ends a move."""

    def __init__(self, engine: EngineThread, served: ServedModel, tiers: BlobTiers) -> None:
        self._engine = engine
        self._served = served
        self.tiers = tiers
        self._storing = asyncio.Lock()
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tiers")
        self.policy = FetchPolicy()

    @property
    def is_alone(self) -> bool:
        """The engine's memory is all there is."""
        return not self.tiers.stores

    def tier_of(self, key: bytes) -> str:
        """The nearest tier that lists a blob; empty where none does."""
        return next(iter(self.tiers.sizes(key)), "")

    async def take_back(self) -> list[KeptState]:
        """See `BlobTiers.take_back`."""
        return await self._run(self.tiers.take_back)

    async def store(self, key: bytes, receipt: bytes, is_wanted: Callable[[], bool]) -> None:
        """Write a state of the engine's memory to every tier that takes it; one at a time.

        What is not wanted any more by then is removed again.
        """
        async with self._storing:
            pieces = await self._export(key, receipt) if is_wanted() else None
            if pieces is not None:
                await self._run(self.tiers.put, key, pieces)
                if not is_wanted():
                    await self.delete([key])

    async def read(self, key: bytes) -> ReadableState | None:
        """A state, wherever it lies here; None where it is nowhere, or of no use. Close it."""
        outgoing = await self._engine.acquire(lambda engine: _open(engine, key), _close)
        if outgoing is not None:
            return EngineState(self._engine, self._served, outgoing, self.threads)
        captured = await self._engine.acquire(lambda engine: _open_capture(engine, key), _close_capture)
        if captured is not None:
            return CapturingState(self._engine, self._served, captured, self.threads)
        for tier in self.tiers.sizes(key):
            try:
                return BlobState(await self._run(self.tiers.open, tier, key), self.threads)
            except (BlobError, OSError) as error:
                await self._run(self.tiers.give_up, tier, key, error)
        return None

    async def delete(self, keys: Iterable[bytes]) -> int:
        """Remove blobs from every tier; returns how many keys any of them held.

        A medium that hangs is not waited for: the removal goes on behind, and heartbeats must not miss their time.
        """
        if self.is_alone:
            return 0
        removal = asyncio.ensure_future(self._run(self.tiers.delete, tuple(keys)))
        done, _ = await asyncio.wait([removal], timeout=_DELETE_SECONDS)
        if not done:
            get_logger().warning("tier_slow", removing=True)
        return removal.result() if done else 0

    def close(self) -> None:
        """Wait for the moves that run, and let go of the tiers."""
        self.threads.shutdown(cancel_futures=True)
        self.tiers.close()

    async def _export(self, key: bytes, receipt: bytes) -> list[Buffer] | None:
        job = await self._engine.call(lambda engine: self._begin_export(engine, key, receipt))
        if job is None:
            return None
        pieces: list[Buffer] = await asyncio.wrap_future(job)
        return pieces

    def _begin_export(self, engine: Engine, key: bytes, receipt: bytes) -> "Future[list[Buffer]] | None":
        """In one step on the engine's thread, so that what is opened is closed behind the copy, whoever still waits for it."""
        outgoing = _open(engine, key)
        if outgoing is None:
            return None
        job = self.threads.submit(write_blob, self._served, outgoing, receipt)
        job.add_done_callback(lambda _: self._engine.post(lambda _: outgoing.close()))
        return job

    async def _run(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)


def _open(engine: Engine, key: bytes) -> OutgoingState | None:
    state = engine.context.store.get(key)
    return OutgoingState(engine.context, state) if isinstance(state, SegmentState) else None


def _close(_engine: Engine, outgoing: OutgoingState | None) -> None:
    if outgoing is not None:
        outgoing.close()


def _open_capture(engine: Engine, key: bytes) -> CapturedState | None:
    progress = engine.find_capture(key)
    return None if progress is None else CapturedState(progress, OutgoingState(engine.context, progress.state))


def _close_capture(engine: Engine, captured: CapturedState | None) -> None:
    _close(engine, None if captured is None else captured.outgoing)
