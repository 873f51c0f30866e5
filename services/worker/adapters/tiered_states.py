"""Segment states between the engine's memory and the tiers below it: down behind a publish, up when a prompt needs them."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from services.blob.errors import BlobError
from services.blob.planes import Buffer
from services.blob.reader import BytesSource, StateReader
from services.common.telemetry import get_logger
from services.worker.adapters.blob_tiers import BlobTiers, KeptState
from services.worker.adapters.blob_transfer import LoadedBlob, load_blob, write_blob
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.served_model import ServedModel
from services.worker.engine.loop import Engine
from services.worker.engine.pages import NoRoomError
from services.worker.engine.states import SegmentState
from services.worker.engine.transfer import IncomingState, OutgoingState
from services.worker.tiers.speeds import FetchPolicy

__all__ = ["Fetched", "TieredStates"]

Result = TypeVar("Result")
# Moves of bytes that run at once: one down, and a few prompts' up.
_THREADS = 4
_DELETE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of a state that was not in the engine's memory. tier: whence it came; reason: why it did not."""

    tier: str = ""
    reason: str = ""


class TieredStates:
    """Lives on the event loop; bytes move on threads beside it, and the engine's thread only begins and ends a move.

    fetch_seconds: no prompt waits longer for a state.
    """

    def __init__(
        self, engine: EngineThread, served: ServedModel, tiers: BlobTiers, metrics: WorkerMetrics, fetch_seconds: float
    ) -> None:
        self._engine = engine
        self._served = served
        self._tiers = tiers
        self._metrics = metrics
        self._fetch_seconds = fetch_seconds
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tiers")
        self._storing = asyncio.Lock()
        self._fetching: dict[bytes, asyncio.Task[Fetched]] = {}
        # The tiers that running fetches read from.
        self._sources: dict[bytes, str] = {}
        self.policy = FetchPolicy()

    @property
    def is_alone(self) -> bool:
        """The engine's memory is all there is."""
        return not self._tiers.stores

    def tier_of(self, key: bytes) -> str:
        """The nearest tier that lists a blob; empty where none does."""
        return next(iter(self._tiers.sizes(key)), "")

    async def take_back(self) -> list[KeptState]:
        """See `BlobTiers.take_back`."""
        return await self._run(self._tiers.take_back)

    async def store(self, key: bytes, receipt: bytes, is_wanted: Callable[[], bool]) -> None:
        """Write a state of the engine's memory to every tier that takes it; one at a time.

        What is not wanted any more by then is removed again.
        """
        async with self._storing:
            pieces = await self._export(key, receipt) if is_wanted() else None
            if pieces is not None:
                await self._run(self._tiers.put, key, pieces)
                if not is_wanted():
                    await self.delete([key])

    async def fetch(self, key: bytes, token_ids: tuple[int, ...], protected: Collection[bytes]) -> Fetched | None:
        """Bring a state into the engine's memory, where no protected one makes room; None where no tier lists it."""
        task = self._fetching.get(key)
        if task is None:
            if not self.tier_of(key):
                return None
            task = asyncio.create_task(self._bring(key, token_ids, protected))
            self._fetching[key] = task
            task.add_done_callback(lambda _: self._forget_fetch(key))
        try:
            # Prompts that wait for one state share its fetch, which outlives any of them.
            async with asyncio.timeout(self._fetch_seconds):
                return await asyncio.shield(task)
        except TimeoutError:
            if key in self._sources:
                self.policy.speed(self._sources[key]).observe_timeout(self._fetch_seconds)
            return Fetched(reason="fetch_timeout")

    async def read(self, key: bytes) -> StateReader | None:
        """A state's blob, opened, wherever it lies; None where it is nowhere, or of no use."""
        pieces = await self._export(key, b"")
        if pieces is not None:
            return StateReader(BytesSource(b"".join(pieces)))
        for tier in self._tiers.sizes(key):
            try:
                return await self._run(self._tiers.open, tier, key)
            except (BlobError, OSError) as error:
                await self._run(self._tiers.give_up, tier, key, error)
        return None

    async def delete(self, keys: Iterable[bytes]) -> int:
        """Remove blobs from every tier; returns how many keys any of them held.

        A medium that hangs is not waited for: the removal goes on behind, and heartbeats must not miss their time.
        """
        if self.is_alone:
            return 0
        removal = asyncio.ensure_future(self._run(self._tiers.delete, tuple(keys)))
        done, _ = await asyncio.wait([removal], timeout=_DELETE_SECONDS)
        if not done:
            get_logger().warning("tier_slow", removing=True)
        return removal.result() if done else 0

    def close(self) -> None:
        """Wait for the moves that run, and let go of the tiers."""
        self._threads.shutdown(cancel_futures=True)
        self._tiers.close()

    def _forget_fetch(self, key: bytes) -> None:
        self._fetching.pop(key, None)
        self._sources.pop(key, None)

    async def _bring(self, key: bytes, token_ids: tuple[int, ...], protected: Collection[bytes]) -> Fetched:
        """Never raises: whatever happens on the way, the part is computed in its place."""
        try:
            return await self._bring_from_any(key, token_ids, protected)
        except Exception as error:
            get_logger().warning("fetch_failed", key=key.hex(), error=str(error))
            return Fetched(reason="fetch_failed")

    async def _bring_from_any(self, key: bytes, token_ids: tuple[int, ...], protected: Collection[bytes]) -> Fetched:
        """From the quickest tier; where that fails from the next."""
        found = Fetched(reason="blob_missing")
        sizes = self._tiers.sizes(key)
        body = len(token_ids) - self._served.profile.seam.tokens(len(token_ids))
        while sizes and not found.tier and found.reason != "no_room":
            tier = self.policy.choose(sizes, body)
            if tier is None:
                return Fetched(reason="fetch_slower")
            del sizes[tier]
            self._sources[key] = tier
            found = await self._bring_from(tier, key, token_ids, protected)
        return found

    async def _bring_from(
        self, tier: str, key: bytes, token_ids: tuple[int, ...], protected: Collection[bytes]
    ) -> Fetched:
        try:
            incoming = await self._engine.call(lambda engine: IncomingState(engine.context, token_ids, protected))
        except NoRoomError:
            return Fetched(reason="no_room")
        began = time.monotonic()
        try:
            reader = await self._run(self._tiers.open, tier, key)
            latency = time.monotonic() - began
            loaded: LoadedBlob = await self._run(load_blob, self._served, reader, incoming)
        except Exception as error:
            await self._engine.call(lambda _: incoming.abandon())
            return Fetched(reason=await self._run(self._tiers.give_up, tier, key, error))
        try:
            await self._engine.call(lambda engine: _finish(engine, key, incoming))
        except NoRoomError:
            return Fetched(reason="no_room")
        self.policy.speed(tier).observe(latency, loaded.seconds, loaded.num_bytes)
        self._metrics.on_promotion(tier, latency + loaded.seconds)
        return Fetched(tier=tier)

    async def _export(self, key: bytes, receipt: bytes) -> list[Buffer] | None:
        job = await self._engine.call(lambda engine: self._begin_export(engine, key, receipt))
        if job is None:
            return None
        pieces: list[Buffer] = await asyncio.wrap_future(job)
        return pieces

    def _begin_export(self, engine: Engine, key: bytes, receipt: bytes) -> "Future[list[Buffer]] | None":
        """In one step on the engine's thread, so that what is opened is closed behind the copy, whoever still waits for it."""
        state = engine.context.store.get(key)
        if not isinstance(state, SegmentState):
            return None
        outgoing = OutgoingState(engine.context, state)
        job = self._threads.submit(write_blob, self._served, outgoing, receipt)
        job.add_done_callback(lambda _: self._engine.post(lambda _: outgoing.close()))
        return job

    async def _run(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _finish(engine: Engine, key: bytes, incoming: IncomingState) -> None:
    """A capture may have been quicker: what is stored stays."""
    if key in engine.context.store:
        incoming.abandon()
    else:
        incoming.finish(key)
