"""`Fetch` and `Drop` of a real worker over real gRPC: planes layer by layer, whole, and nothing left behind."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from blake3 import blake3
from hypic.v1 import worker_pb2, worker_pb2_grpc
from prometheus_client import CollectorRegistry

from services.common.content import HASH_BYTES
from services.common.rpc import HealthSwitch, create_channel, create_server
from services.worker.adapters.cache_client import CacheClient, WorkerIdentity
from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.residency import Residency
from services.worker.adapters.served_model import read_served_model
from services.worker.app import WorkerService
from services.worker.engine.requests import CaptureEvent, CaptureJob, CaptureSegment
from services.worker.settings import WorkerSettings
from tests.e2e.stack.checkpoint import write_random_checkpoint
from tests.exactness.rig import draw_ids

KEY = bytes(range(HASH_BYTES))
IDS = tuple(token % 64 for token in draw_ids(90, 5))
DEMO = Path(__file__).parents[2] / "models" / "demo"
_CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ServedWorker:
    """A worker without a cache service; states enter it through its engine."""

    stub: "worker_pb2_grpc.WorkerServiceAsyncStub"
    engine: EngineThread

    async def capture(self) -> None:
        """Store `IDS` under `KEY`."""
        done: asyncio.Queue[CaptureEvent] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(event: CaptureEvent) -> None:
            loop.call_soon_threadsafe(done.put_nowait, event)

        job = CaptureJob("test", (CaptureSegment(KEY, IDS),), sink)
        await self.engine.call(lambda engine: engine.submit_capture(job))
        assert (await asyncio.wait_for(done.get(), _CALL_SECONDS)).reason == ""

    async def fetch(self, key: bytes = KEY, from_layer: int = 0, wait_seconds: float = 0.0) -> list[worker_pb2.Chunk]:
        """All chunks."""
        request = worker_pb2.FetchRequest(key=key, from_layer=from_layer, wait_seconds=wait_seconds)
        return [chunk async for chunk in self.stub.Fetch(request, timeout=_CALL_SECONDS)]


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[ServedWorker]:
    write_random_checkpoint(tmp_path, DEMO)
    settings = WorkerSettings(checkpoint=tmp_path, page_bytes=16 << 20, state_bytes=64 << 20)
    served = read_served_model(settings)
    engine = EngineThread(lambda: build_engine(settings, served), lambda error: None)
    await engine.start()
    cache_channel = create_channel("127.0.0.1:1")
    identity = WorkerIdentity("w", "127.0.0.1:1", served.revision, served.profile_digest, "host")
    residency = Residency(engine, CacheClient(cache_channel, identity), "host")
    service = WorkerService(served, "w", 16, engine, residency, WorkerMetrics(CollectorRegistry()))
    server, port = await create_server(
        [lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)],
        "127.0.0.1:0",
        HealthSwitch(),
    )
    channel = create_channel(f"127.0.0.1:{port}")
    yield ServedWorker(worker_pb2_grpc.WorkerServiceStub(channel), engine)
    await engine.call(lambda running: running.check_integrity())
    await channel.close()
    await server.stop(0)
    await cache_channel.close()
    engine.stop()


def _planes(chunks: list[worker_pb2.Chunk]) -> dict[tuple[int, str], bytes]:
    """Planes put together; each is in order, whole, and closed by its checksum."""
    planes: dict[tuple[int, str], bytes] = {}
    closed: set[tuple[int, str]] = set()
    for chunk in chunks:
        place = (chunk.layer, chunk.plane)
        assert place not in closed
        assert chunk.offset == len(planes.setdefault(place, b""))
        planes[place] += chunk.data
        if chunk.checksum:
            assert chunk.checksum == blake3(planes[place]).digest()
            closed.add(place)
    assert closed == set(planes)
    return planes


async def test_a_state_comes_whole_and_says_what_it_is(worker: ServedWorker) -> None:
    await worker.capture()
    chunks = await worker.fetch()
    header: dict[str, Any] = json.loads(chunks[0].header)
    assert not any(chunk.header for chunk in chunks[1:])
    assert tuple(header["token_ids"]) == IDS
    described = {(plane["layer"], plane["name"]): plane["bytes"] for plane in header["planes"]}
    planes = _planes(chunks)
    assert {place: len(data) for place, data in planes.items()} == described
    assert [chunk.layer for chunk in chunks] == sorted(chunk.layer for chunk in chunks)
    assert _planes(await worker.fetch()) == planes


async def test_later_layers_alone(worker: ServedWorker) -> None:
    await worker.capture()
    planes = _planes(await worker.fetch())
    later = _planes(await worker.fetch(from_layer=2))
    assert later == {place: data for place, data in planes.items() if place[0] >= 2}
    assert await worker.fetch(from_layer=1000) == []


async def test_a_fetch_waits_for_a_state_that_is_being_computed(worker: ServedWorker) -> None:
    waiting = asyncio.create_task(worker.fetch(wait_seconds=_CALL_SECONDS))
    await asyncio.sleep(0)
    await worker.capture()
    assert _planes(await waiting)


@pytest.mark.parametrize("wait_seconds", [0.0, 0.05, -1.0, float("nan")])
async def test_a_state_that_is_not_there(wait_seconds: float, worker: ServedWorker) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.fetch(wait_seconds=wait_seconds)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_fetches_that_are_left_hold_no_pages(worker: ServedWorker) -> None:
    """Left at any moment, and the state dropped behind them: every page is free again."""
    free = await worker.engine.call(lambda engine: engine.context.pages.num_free)
    await worker.capture()
    request = worker_pb2.FetchRequest(key=KEY)
    for turns in range(12):
        call = worker.stub.Fetch(request, timeout=_CALL_SECONDS)
        reading = asyncio.create_task(call.read())
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert _planes(await worker.fetch())
    response = await worker.stub.Drop(worker_pb2.DropRequest(keys=[KEY, bytes(HASH_BYTES)]), timeout=_CALL_SECONDS)
    assert response.num_dropped == 1
    assert await worker.engine.call(lambda engine: engine.context.pages.num_free) == free
