"""What this worker has published, and the two ways in which a state comes and goes: publish and drop."""

import asyncio
from collections.abc import Iterable

from hypic.v1 import cache_pb2, worker_pb2

from services.common.errors import ConflictError, HypicError
from services.common.telemetry import get_logger
from services.worker.adapters.cache_client import CacheClient, Published
from services.worker.adapters.engine_thread import EngineThread
from services.worker.engine.commands import Drop
from services.worker.engine.loop import Engine
from services.worker.engine.states import SegmentState

__all__ = ["Residency"]

_RETRY_SECONDS = 1.0


class Residency:
    """Keeps the engine's store and the directory in step. A state is kept only while the directory lists it."""

    def __init__(self, engine: EngineThread, cache: CacheClient, tier: str) -> None:
        self._engine = engine
        self._cache = cache
        self._tier = tier
        self._published: dict[bytes, cache_pb2.ResidentEntry] = {}

    async def publish(self, key: bytes, ticket: worker_pb2.TicketRef, size_bytes: int) -> str:
        """Publish a state that the store holds. Returns why it was not kept; empty when it was.

        A copy that an earlier publish made visible stays, whatever becomes of this one.
        """
        try:
            published = await self._publish_known(key, ticket, size_bytes)
        except HypicError as error:
            get_logger().warning("publish_failed", error=str(error))
            return await self._refuse(key, "cache_unavailable")
        if published.refusal:
            return await self._refuse(key, published.refusal)
        entry = await self._engine.call(lambda engine: self._describe(engine, key, published.receipt))
        if entry is None:
            return "state_dropped"
        self._published[key] = entry
        await self.drop(published.drop_keys)
        return ""

    async def _refuse(self, key: bytes, reason: str) -> str:
        if key in self._published:
            return ""
        await self.drop([key])
        return reason

    async def _publish_known(self, key: bytes, ticket: worker_pb2.TicketRef, size_bytes: int) -> Published:
        """A directory that has just started does not know this worker: it is told, then asked again."""
        try:
            return await self._cache.publish(key, ticket.ticket_id, ticket.fence, size_bytes)
        except ConflictError:
            await self.report()
            return await self._cache.publish(key, ticket.ticket_id, ticket.fence, size_bytes)

    async def drop(self, keys: Iterable[bytes]) -> int:
        """Make states unreachable here; returns how many were there."""
        wanted = tuple(keys)
        for key in wanted:
            self._published.pop(key, None)
        if not wanted:
            return 0
        return await self._engine.call(Drop(wanted))

    async def forget_ordered(self, keys: Iterable[bytes]) -> None:
        """Drop published states that are ordered anew: a directory that listed them still would have said so."""
        await self.drop([key for key in keys if key in self._published])

    async def abandon(self, keys: Iterable[bytes]) -> None:
        """Drop states of a request that ended before they were published."""
        await self.drop([key for key in keys if key not in self._published])

    async def report(self) -> float:
        """One heartbeat; drops what the directory names. Returns the seconds for which the directory believes it.

        Raises:
            HypicError: the cache service does not answer.
        """
        await self._forget_evicted()
        response = await self._cache.heartbeat(list(self._published.values()), await self._load())
        await self.drop(response.drop_keys)
        return response.time_to_live_seconds

    async def keep_reporting(self) -> None:
        """Heartbeats for ever; survives an absent cache service."""
        reachable = True
        while True:
            pause = _RETRY_SECONDS
            try:
                pause = await self.report() / 3
            except HypicError as error:
                if reachable:
                    get_logger().warning("cache_unreachable", error=str(error))
                reachable = False
            else:
                reachable = True
            await asyncio.sleep(pause)

    async def _forget_evicted(self) -> None:
        """The engine evicts by itself where memory runs out; the directory learns of it by what is not listed."""
        keys = tuple(self._published)
        gone = await self._engine.call(lambda engine: [key for key in keys if key not in engine.context.store])
        for key in gone:
            self._published.pop(key, None)

    async def _load(self) -> cache_pb2.WorkerLoad:
        def read(engine: Engine) -> cache_pb2.WorkerLoad:
            store = engine.context.store
            return cache_pb2.WorkerLoad(
                num_requests_running=engine.num_running,
                num_requests_waiting=engine.num_waiting,
                state_bytes_used=store.used_bytes,
                state_bytes_capacity=store.capacity_bytes,
            )

        return await self._engine.call(read)

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
