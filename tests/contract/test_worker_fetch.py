"""`Fetch` and `Drop` of a real worker over real gRPC: planes layer by layer, whole, and nothing left behind."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from blake3 import blake3
from hypic.v1 import worker_pb2, worker_pb2_grpc

from services.blob.planes import ITEM_BYTES
from services.common.content import HASH_BYTES
from services.common.rpc import HealthSwitch, create_channel, create_server
from services.worker.adapters.cache_client import CacheClient, WorkerIdentity
from services.worker.adapters.description import WorkerPlace
from services.worker.adapters.held_states import HeldStates
from services.worker.adapters.residency import Residency
from services.worker.adapters.state_stream import read_header
from services.worker.app import WorkerService
from services.worker.tiers.host import HostStore
from tests.contract.generating_worker import HOLD_LIMITS
from tests.contract.served_worker import CALL_SECONDS, IDS, KEY, EngineWithTiers, run_engine


@dataclass(frozen=True, slots=True)
class ServedWorker:
    """A worker without a cache service; states enter it through its engine."""

    stub: "worker_pb2_grpc.WorkerServiceAsyncStub"
    running: EngineWithTiers

    async def fetch(self, key: bytes = KEY, from_layer: int = 0, wait_seconds: float = 0.0) -> list[worker_pb2.Chunk]:
        """All chunks."""
        request = worker_pb2.FetchRequest(key=key, from_layer=from_layer, wait_seconds=wait_seconds)
        return [chunk async for chunk in self.stub.Fetch(request, timeout=CALL_SECONDS)]


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[ServedWorker]:
    async with run_engine(tmp_path, [HostStore(1 << 26)]) as running:
        served = running.served
        cache_channel = create_channel("127.0.0.1:1")
        identity = WorkerIdentity("w", "127.0.0.1:1", served.revision, served.profile_digest, "host")
        residency = Residency(running.engine, CacheClient(cache_channel, identity), "host", running.tiers)
        held = HeldStates(running.engine, served, True, HOLD_LIMITS, running.metrics, running.tiers.threads)
        place = WorkerPlace("w")
        service = WorkerService(served, place, running.engine, residency, running.transfers, held, running.metrics)
        server, port = await create_server(
            [lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)],
            "127.0.0.1:0",
            HealthSwitch(),
        )
        channel = create_channel(f"127.0.0.1:{port}")
        yield ServedWorker(worker_pb2_grpc.WorkerServiceStub(channel), running)
        await channel.close()
        await server.stop(0)
        await cache_channel.close()


def _planes(chunks: list[worker_pb2.Chunk]) -> dict[tuple[int, str], bytes]:
    """Planes put together; each is in order, whole, and closed by its checksum. Header and receipt stand round them."""
    first, *middle, last = chunks
    assert first.header
    assert not first.data
    assert last == worker_pb2.Chunk(key=last.key, receipt=last.receipt)
    planes: dict[tuple[int, str], bytes] = {}
    sizes: dict[tuple[int, str], int] = {}
    closed: set[tuple[int, str]] = set()
    for chunk in middle:
        place = (chunk.layer, chunk.plane)
        assert place not in closed
        assert chunk.offset == len(planes.setdefault(place, b""))
        planes[place] += chunk.data
        if chunk.dtype:
            sizes[place] = math.prod(chunk.shape) * ITEM_BYTES[chunk.dtype]
        if chunk.checksum:
            assert chunk.checksum == blake3(planes[place]).digest()
            closed.add(place)
    assert closed == set(planes)
    assert sizes == {place: len(data) for place, data in planes.items()}
    for layer in {chunk.layer for chunk in middle}:
        own = [data for (other, _), data in planes.items() if other == layer]
        promised = next(chunk for chunk in middle if chunk.layer == layer)
        assert (promised.layer_planes, promised.layer_bytes) == (len(own), sum(map(len, own)))
    return planes


async def test_a_state_comes_whole_and_says_what_it_is(worker: ServedWorker) -> None:
    await worker.running.capture()
    chunks = await worker.fetch()
    planes = _planes(chunks)
    header = read_header(chunks[0], worker.running.served, IDS)
    assert header.token_ids == IDS
    assert {layer for layer, _ in planes} == set(range(header.num_layers))
    layers = [chunk.layer for chunk in chunks[1:-1]]
    assert layers == sorted(layers)
    assert _planes(await worker.fetch()) == planes


async def test_a_state_comes_from_a_lower_tier_as_from_the_engine(worker: ServedWorker) -> None:
    await worker.running.capture()
    planes = _planes(await worker.fetch())
    await worker.running.tiers.store(KEY, b"receipt", lambda: True)
    await worker.running.drop()
    assert _planes(await worker.fetch()) == planes
    assert not await worker.running.holds()


async def test_later_layers_alone(worker: ServedWorker) -> None:
    await worker.running.capture()
    planes = _planes(await worker.fetch())
    later = _planes(await worker.fetch(from_layer=2))
    assert later == {place: data for place, data in planes.items() if place[0] >= 2}
    assert len(await worker.fetch(from_layer=1000)) == 2


async def test_a_fetch_waits_for_a_state_that_is_being_computed(worker: ServedWorker) -> None:
    waiting = asyncio.create_task(worker.fetch(wait_seconds=CALL_SECONDS))
    await asyncio.sleep(0)
    await worker.running.capture()
    assert _planes(await waiting)


@pytest.mark.parametrize("wait_seconds", [0.0, 0.05, -1.0, float("nan")])
async def test_a_state_that_is_not_there(wait_seconds: float, worker: ServedWorker) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.fetch(wait_seconds=wait_seconds)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_fetches_that_are_left_hold_no_pages(worker: ServedWorker) -> None:
    """Left at any moment, and the state dropped behind them: every page is free again."""
    free = await worker.running.free_pages()
    await worker.running.capture()
    request = worker_pb2.FetchRequest(key=KEY)
    for turns in range(12):
        call = worker.stub.Fetch(request, timeout=CALL_SECONDS)
        reading = asyncio.create_task(call.read())
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert _planes(await worker.fetch())
    response = await worker.stub.Drop(worker_pb2.DropRequest(keys=[KEY, bytes(HASH_BYTES)]), timeout=CALL_SECONDS)
    assert response.num_dropped == 1
    # A copy that nobody waits for any more ends by itself.
    async with asyncio.timeout(CALL_SECONDS):
        while await worker.running.free_pages() != free:
            pass
