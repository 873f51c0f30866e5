"""Segment states between the engine's memory and elsewhere: down into tiers behind a publish; up from them, or from other
workers, when a prompt needs them.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from services.blob.errors import BlobError
from services.blob.planes import Buffer
from services.common.telemetry import get_logger
from services.worker.adapters.blob_tiers import BlobTiers, KeptState
from services.worker.adapters.blob_transfer import write_blob
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.peer_states import FetchLimits, PeerStates, Source
from services.worker.adapters.readable_states import BlobState, EngineState, ReadableState
from services.worker.adapters.served_model import ServedModel
from services.worker.adapters.state_moves import Move, PeerMove, TierMove
from services.worker.engine.loop import Engine
from services.worker.engine.pages import NoRoomError
from services.worker.engine.states import SegmentState
from services.worker.engine.transfer import IncomingState, OutgoingState
from services.worker.tiers.speeds import OTHER_HOST, SAME_HOST, FetchPolicy

__all__ = ["Fetched", "TieredStates", "WantedState"]

Result = TypeVar("Result")
# Moves of bytes that run at once: one down, and a few prompts' up.
_THREADS = 4
_DELETE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WantedState:
    """A state that a prompt uses. sources: other workers that hold it; is_listed: this worker has published it."""

    token_ids: tuple[int, ...]
    sources: tuple[Source, ...] = ()
    is_listed: bool = True


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of a state that was not in the engine's memory. tier: whence it came; reason: why it did not.

    source: the worker that it came from, with the receipt of that one's copy.
    """

    tier: str = ""
    reason: str = ""
    source: str = ""
    receipt: bytes = b""
    seconds: float = field(default=0.0, compare=False)


class TieredStates:
    """Lives on the event loop; bytes move on threads beside it, and the engine's thread only begins and ends a move.

    fetch_seconds: no prompt waits longer for a state.
    """

    def __init__(
        self,
        engine: EngineThread,
        served: ServedModel,
        tiers: BlobTiers,
        peers: PeerStates,
        metrics: WorkerMetrics,
        fetch_seconds: float,
    ) -> None:
        self._engine = engine
        self._served = served
        self._tiers = tiers
        self._peers = peers
        self._metrics = metrics
        self._fetch_seconds = fetch_seconds
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tiers")
        self._storing = asyncio.Lock()
        self._fetching: dict[bytes, asyncio.Task[Fetched]] = {}
        self._waiting: Counter[bytes] = Counter()
        # The ways that running fetches take.
        self._taken: dict[bytes, str] = {}
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

    async def fetch(self, key: bytes, wanted: WantedState, protected: Collection[bytes]) -> Fetched | None:
        """Bring a state into the engine's memory, where no protected one makes room; None where there is no way to it."""
        task = self._fetching.get(key)
        if task is None:
            if not self._ways(key, wanted):
                return None
            task = asyncio.create_task(self._bring(key, wanted, protected))
            self._fetching[key] = task
            task.add_done_callback(lambda ended: self._forget_fetch(key, ended))
        # Prompts that wait for one state share its fetch.
        self._waiting[key] += 1
        try:
            async with asyncio.timeout(self._fetch_seconds):
                return await asyncio.shield(task)
        except TimeoutError:
            if key in self._taken:
                self.policy.speed(self._taken[key]).observe_timeout(self._fetch_seconds)
            return Fetched(reason="fetch_timeout")
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                self._leave_fetch(key, task)

    async def read(self, key: bytes) -> ReadableState | None:
        """A state, wherever it lies here; None where it is nowhere, or of no use. Close it."""
        outgoing = await self._engine.acquire(lambda engine: _open(engine, key), _close)
        if outgoing is not None:
            return EngineState(self._engine, self._served, outgoing, self._threads)
        for tier in self._tiers.sizes(key):
            try:
                return BlobState(await self._run(self._tiers.open, tier, key), self._threads)
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

    async def close(self) -> None:
        """Wait for the moves that run, and let go of tiers and other workers."""
        for task in self._fetching.values():
            task.cancel()
        await asyncio.gather(*self._fetching.values(), return_exceptions=True)
        self._threads.shutdown(cancel_futures=True)
        self._tiers.close()
        await self._peers.close()

    def _leave_fetch(self, key: bytes, task: "asyncio.Task[Fetched]") -> None:
        """Nobody waits: other workers are spared the rest; a lower tier's state is of use to the next who asks."""
        if self._taken.get(key) in (SAME_HOST, OTHER_HOST):
            self._forget_fetch(key, task)
            task.cancel()

    def _forget_fetch(self, key: bytes, task: "asyncio.Task[Fetched]") -> None:
        if self._fetching.get(key) is task:
            del self._fetching[key]
            self._taken.pop(key, None)

    def _ways(self, key: bytes, wanted: WantedState) -> dict[str, int]:
        """Tiers that the state may come from, other workers' memory among them, with the bytes that would."""
        ways = self._tiers.sizes(key) if wanted.is_listed else {}
        estimate = self._served.state_bytes + len(wanted.token_ids) * self._served.token_bytes
        return ways | {self._peers.way(source): estimate for source in wanted.sources}

    def _moves(self, way: str, wanted: WantedState) -> Iterator[Move]:
        sources = [source for source in wanted.sources if self._peers.way(source) == way]
        if not sources:
            yield TierMove(way, self._served, self._tiers, self._threads)
        limits = FetchLimits(0.0, self._fetch_seconds, self._fetch_seconds)
        for source in sources:
            yield PeerMove(way, source, limits, self._peers, self._threads)

    async def _bring(self, key: bytes, wanted: WantedState, protected: Collection[bytes]) -> Fetched:
        """Whatever happens on the way, the part is computed in its place."""
        try:
            return await self._bring_from_any(key, wanted, protected)
        except NoRoomError:
            return Fetched(reason="no_room")
        except Exception as error:
            get_logger().warning("fetch_failed", key=key.hex(), error=str(error))
            return Fetched(reason="fetch_failed")

    async def _bring_from_any(self, key: bytes, wanted: WantedState, protected: Collection[bytes]) -> Fetched:
        """By the quickest way; where that fails by the next."""
        found = Fetched(reason="blob_missing")
        ways = self._ways(key, wanted)
        body = len(wanted.token_ids) - self._served.profile.seam.tokens(len(wanted.token_ids))
        while ways and not found.tier:
            way = self.policy.choose(ways, body)
            if way is None:
                return Fetched(reason="fetch_slower")
            del ways[way]
            self._taken[key] = way
            for move in self._moves(way, wanted):
                found = await self._bring_by(move, key, wanted.token_ids, protected)
                if found.tier:
                    break
        return found

    async def _bring_by(
        self, move: Move, key: bytes, token_ids: tuple[int, ...], protected: Collection[bytes]
    ) -> Fetched:
        began = time.monotonic()
        incoming = await self._engine.acquire(
            lambda engine: IncomingState(engine.context, token_ids, protected), lambda _, made: made.abandon()
        )
        try:
            moved = await move.run(key, incoming)
        except Exception as error:
            await self._engine.call(lambda _: incoming.abandon())
            self._metrics.failed_fetches.labels(move.way).inc()
            return Fetched(reason=await move.give_up(key, error))
        except BaseException:
            self._engine.post(lambda _: incoming.abandon())
            raise
        # What has come whole is kept, whoever still waits for it.
        await asyncio.shield(self._engine.call(lambda engine: _finish(engine, key, incoming)))
        self.policy.speed(move.way).observe(moved.latency_seconds, moved.seconds, moved.num_bytes)
        seconds = time.monotonic() - began
        self._metrics.on_fetched(move.way, seconds, moved.num_bytes)
        return Fetched(move.way, "", moved.source, moved.receipt, seconds)

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
        job = self._threads.submit(write_blob, self._served, outgoing, receipt)
        job.add_done_callback(lambda _: self._engine.post(lambda _: outgoing.close()))
        return job

    async def _run(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _open(engine: Engine, key: bytes) -> OutgoingState | None:
    state = engine.context.store.get(key)
    return OutgoingState(engine.context, state) if isinstance(state, SegmentState) else None


def _close(_engine: Engine, outgoing: OutgoingState | None) -> None:
    if outgoing is not None:
        outgoing.close()


def _finish(engine: Engine, key: bytes, incoming: IncomingState) -> None:
    """A capture may have been quicker: what is stored stays."""
    if key in engine.context.store:
        incoming.abandon()
    else:
        incoming.finish(key)
