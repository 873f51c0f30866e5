"""Two workers over real gRPC: one holds a state, one wants it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from hypic.v1 import worker_pb2, worker_pb2_grpc

from services.common.rpc import HealthSwitch, create_server
from services.worker.adapters.byte_budget import ByteBudget
from services.worker.adapters.peer_states import Source
from services.worker.adapters.state_sender import StateSender
from services.worker.adapters.transfers import Fetched, WantedState
from tests.contract.served_worker import DEMO, IDS, KEY, EngineWithTiers, run_engine
from tests.e2e.stack.checkpoint import write_random_checkpoint
from tests.stub_cache import StubCache
from tests.stub_worker import StubWorker

__all__ = ["RECEIPT", "Chunk", "Holder", "Pair", "as_sent", "has_free", "is_", "pair", "planes_of", "until"]

Chunk = worker_pb2.Chunk
RECEIPT = b"the holder's receipt"


def as_sent(chunks: list[Chunk]) -> list[Chunk]:
    """Nothing happens on the way."""
    return chunks


@dataclass
class Holder(StubWorker):
    """`Fetch` of an engine, with something that happens to the messages on their way."""

    running: EngineWithTiers = field(kw_only=True)
    spoil: Callable[[list[Chunk]], list[Chunk]] = as_sent
    pause_seconds: float = 0.0
    streams: bool = False
    spoil_one: Callable[[Chunk], None] | None = None
    num_calls: int = 0
    sent: list[tuple[Chunk, bool]] = field(default_factory=list)

    async def Fetch(  # noqa: N802
        self, request: worker_pb2.FetchRequest, context: grpc.aio.ServicerContext[worker_pb2.FetchRequest, Chunk]
    ) -> AsyncIterator[Chunk]:
        self.num_calls += 1
        self.num_running += 1
        try:
            sender = StateSender(self.running.tiers, lambda _: RECEIPT, ByteBudget(1 << 26))
            if self.streams:
                async with aclosing(sender.send(request)) as messages:
                    async for chunk in messages:
                        self.sent.append((chunk, await self.running.holds()))
                        if self.spoil_one is not None:
                            self.spoil_one(chunk)
                        yield chunk
                        await asyncio.sleep(self.pause_seconds)
                return
            chunks = [chunk async for chunk in sender.send(request)]
            for chunk in self.spoil(chunks):
                yield chunk
                await asyncio.sleep(self.pause_seconds)
        finally:
            self.num_running -= 1


@dataclass
class Pair:
    """A worker that holds a state, and one that wants it."""

    holder: Holder
    wanting: EngineWithTiers
    source: Source
    sources: tuple[Source, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.sources = (self.source,)

    async def fetch(self, ids: tuple[int, ...] = IDS, wait_seconds: float = 0.0) -> Fetched | None:
        return await self.wanting.fetch(KEY, WantedState(ids, self.sources, wait_seconds))


@asynccontextmanager
async def pair(
    directory: Path, fetch_seconds: float = 20.0, num_layers: int = 4, shares_memory: bool = False
) -> AsyncIterator[Pair]:
    """shares_memory: planes go through memory; the holder streams then, as what it sends in advance would never be used."""
    write_random_checkpoint(directory, DEMO, num_layers)
    wants = run_engine(directory, [], fetch_seconds, shares_memory=shares_memory)
    async with run_engine(directory, []) as held, wants as wanting:
        holder = Holder(StubCache(), running=held, streams=shares_memory)
        server, port = await create_server(
            [lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(holder, server)],
            "127.0.0.1:0",
            HealthSwitch(),
        )
        yield Pair(holder, wanting, Source("holder", f"127.0.0.1:{port}"))
        await server.stop(0)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(500):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("condition not met in time")


async def is_(value: bool) -> bool:
    return value


async def has_free(running: EngineWithTiers, pages: int) -> bool:
    return await running.free_pages() == pages


async def planes_of(running: EngineWithTiers) -> list[list[tuple[str, bytes]]]:
    state = await running.tiers.read(KEY)
    assert state is not None
    layers = [[(plane.name, bytes(plane.data)) for plane in planes] async for planes in state.layers(0)]
    await state.close()
    return layers
