"""What this worker has published, and the two ways in which a state comes and goes: publish and drop."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence

from hypic.v1 import cache_pb2, worker_pb2

from services.common.errors import ConflictError, HypicError
from services.common.telemetry import get_logger
from services.worker.adapters.cache_client import CacheClient, Published, WorkerReport
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.self_report import SelfReport
from services.worker.adapters.tiered_states import TieredStates
from services.worker.engine.commands import Drop
from services.worker.engine.loop import Engine
from services.worker.engine.states import SegmentState

__all__ = ["Residency"]

_RETRY_SECONDS = 1.0


class Residency:
    """Keeps engine's memory, tiers and directory in step. A state is kept only while the directory lists it.

    tier: the engine's memory, as the directory names it.
    """

    def __init__(self, engine: EngineThread, cache: CacheClient, tier: str, tiers: TieredStates) -> None:
        self._engine = engine
        self._cache = cache
        self._tier = tier
        self.tiers = tiers
        self.myself = SelfReport(engine, tiers.policy)
        self._published: dict[bytes, cache_pb2.ResidentEntry] = {}
        self._storing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def usage(self) -> list[worker_pb2.TierUsage]:
        """What this worker stores, the engine's memory first."""
        load = self.myself.load
        memory = worker_pb2.TierUsage(
            tier=self._tier,
            num_states=self.myself.num_states,
            used_bytes=load.state_bytes_used,
            capacity_bytes=load.state_bytes_capacity,
        )
        return [memory, *self.tiers.tiers.usage()]

    def begin_draining(self) -> None:
        """Tell the directory at once that this worker takes nothing new."""
        self.myself.is_draining = True
        self._changed.set()

    async def take_back(self) -> int:
        """List what the tiers kept through a restart; the next heartbeat offers it to the directory. Returns how many."""
        for kept in await self.tiers.take_back():
            self._published[kept.key] = cache_pb2.ResidentEntry(
                key=kept.key,
                kind=cache_pb2.ENTRY_KIND_SEGMENT,
                size_bytes=kept.size_bytes,
                num_tokens=kept.num_tokens,
                tier=kept.tier,
                receipt=kept.receipt,
            )
        return len(self._published)

    async def publish(self, key: bytes, ticket: worker_pb2.TicketRef, size_bytes: int) -> str:
        """Publish a state that the store holds. Returns why it was not kept; empty when it was.

        A copy that an earlier publish made visible stays, whatever becomes of this one.
        """
        refusal = await self._publish(key, lambda: self._cache.publish(key, ticket.ticket_id, ticket.fence, size_bytes))
        return await self._refuse(key, refusal) if refusal else ""

    async def publish_copy(self, key: bytes, holder_id: str, receipt: bytes) -> str:
        """Publish a state that came from another worker. Returns why it is not published; empty when it is."""
        if not receipt:
            return "holder_not_published"
        return await self._publish(key, lambda: self._cache.publish_copy(key, holder_id, receipt))

    async def _publish(self, key: bytes, call: Callable[[], Awaitable[Published]]) -> str:
        try:
            published = await self._publish_known(call)
        except HypicError as error:
            get_logger().warning("publish_failed", error=str(error))
            return "cache_unavailable"
        if published.refusal:
            return published.refusal
        entry = await self._engine.call(lambda engine: self._describe(engine, key, published.receipt))
        if entry is None:
            return "state_dropped"
        self._published[key] = entry
        await self.drop(published.drop_keys)
        self._store_behind(entry)
        return ""

    def is_published(self, key: bytes) -> bool:
        """Whether the directory lists a copy of this worker."""
        return key in self._published

    async def drop_unpublished(self, keys: Iterable[bytes]) -> None:
        """Drop what the directory does not list from the engine's memory."""
        await self._drop_from_engine([key for key in keys if key not in self._published])

    def note_change(self) -> None:
        """A copy may be gone: the directory learns of it at once, lest prompts are planned with it."""
        self._changed.set()

    def receipt_of(self, key: bytes) -> bytes:
        """The directory's receipt of a published state; empty of another."""
        entry = self._published.get(key)
        return b"" if entry is None else entry.receipt

    async def settle(self) -> None:
        """Wait until everything published so far lies in the tiers."""
        await asyncio.gather(*self._storing)

    def _store_behind(self, entry: cache_pb2.ResidentEntry) -> None:
        """Nobody waits for the tiers: a state is of use as soon as it is published."""
        if self.tiers.is_alone:
            return
        key, receipt = entry.key, entry.receipt
        task = asyncio.create_task(self.tiers.store(key, receipt, lambda: self._is_published(key, receipt)))
        self._storing.add(task)
        task.add_done_callback(self._on_stored)

    def _on_stored(self, task: "asyncio.Task[None]") -> None:
        self._storing.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            get_logger().warning("store_failed", error=str(error))

    def _is_published(self, key: bytes, receipt: bytes) -> bool:
        entry = self._published.get(key)
        return entry is not None and entry.receipt == receipt

    async def _refuse(self, key: bytes, reason: str) -> str:
        if key in self._published:
            return ""
        await self.drop([key])
        return reason

    async def _publish_known(self, call: Callable[[], Awaitable[Published]]) -> Published:
        """A directory that has just started does not know this worker: it is told, then asked again."""
        try:
            return await call()
        except ConflictError:
            await self.report()
            return await call()

    async def drop(self, keys: Iterable[bytes]) -> int:
        """Make states unreachable here; returns how many were there."""
        wanted = tuple(keys)
        for key in wanted:
            self._published.pop(key, None)
        if not wanted:
            return 0
        dropped, removed = await self._drop_from_engine(wanted), await self.tiers.delete(wanted)
        return max(dropped, removed)

    async def forget_ordered(self, keys: Iterable[bytes]) -> None:
        """Drop published states that are ordered anew: a directory that listed them still would have said so."""
        await self.drop([key for key in keys if key in self._published])

    async def _drop_from_engine(self, keys: Sequence[bytes]) -> int:
        return await self._engine.call(Drop(tuple(keys))) if keys else 0

    async def abandon(self, keys: Iterable[bytes]) -> None:
        """Drop states of a request that ended before they were published."""
        await self.drop([key for key in keys if key not in self._published])

    async def report(self) -> float:
        """One heartbeat; drops what the directory names. Returns the seconds for which the directory believes it.

        Raises:
            HypicError: the cache service does not answer.
        """
        await self._find_tiers()
        await self.myself.refresh()
        myself = self.myself
        report = WorkerReport(list(self._published.values()), myself.load, myself.speeds, myself.is_draining)
        response = await self._cache.heartbeat(report)
        await self.drop(response.drop_keys)
        return response.time_to_live_seconds

    async def keep_reporting(self) -> None:
        """Heartbeats for ever; survives an absent cache service."""
        reachable = True
        while True:
            pause = _RETRY_SECONDS
            self._changed.clear()
            try:
                pause = await self.report() / 3
            except HypicError as error:
                if reachable:
                    get_logger().warning("cache_unreachable", error=str(error))
                reachable = False
            else:
                reachable = True
            await self._wait(pause)

    async def _wait(self, seconds: float) -> None:
        """So long, or until a state is found to be gone, lest prompts are planned with it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _find_tiers(self) -> None:
        """Engine and tiers evict by themselves where room runs out; the directory learns of it by what is listed."""
        keys = tuple(self._published)
        gone = await self._engine.call(lambda engine: {key for key in keys if key not in engine.context.store})
        for key in keys:
            tier = self.tiers.tier_of(key) if key in gone else self._tier
            if not tier:
                self._published.pop(key, None)
            elif (entry := self._published.get(key)) is not None:
                entry.tier = tier

    def _describe(self, engine: Engine, key: bytes, receipt: bytes) -> cache_pb2.ResidentEntry | None:
        state = engine.context.store.get(key)
        if state is None:
            return None
        is_segment = isinstance(state, SegmentState)
        return cache_pb2.ResidentEntry(
            key=key,
            kind=cache_pb2.ENTRY_KIND_SEGMENT if is_segment else cache_pb2.ENTRY_KIND_PREFIX,
            size_bytes=engine.context.store.size_bytes(state),
            num_tokens=len(state.token_ids),
            tier=self._tier,
            receipt=receipt,
        )
