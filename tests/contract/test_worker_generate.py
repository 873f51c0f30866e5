"""`Generate` with orders to capture, of a real worker over real gRPC: what is published, reported, dropped and refused."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from hypic.v1 import cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from prometheus_client import CollectorRegistry

from services.common.content import HASH_BYTES
from services.common.rpc import HealthSwitch, create_channel, create_server
from services.worker.adapters.blob_tiers import BlobTiers
from services.worker.adapters.byte_budget import ByteBudget
from services.worker.adapters.cache_client import CacheClient, WorkerIdentity
from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.messages import WorkerPlace
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.peer_states import PeerStates
from services.worker.adapters.residency import Residency
from services.worker.adapters.served_model import read_served_model
from services.worker.adapters.tiered_states import TieredStates
from services.worker.adapters.transfers import Transfers
from services.worker.app import WorkerService
from services.worker.settings import WorkerSettings
from tests.e2e.stack.checkpoint import write_random_checkpoint
from tests.exactness.rig import draw_ids
from tests.stub_cache import StubCache

KEY, OTHER = bytes(range(HASH_BYTES)), bytes(HASH_BYTES)
IDS, OTHER_IDS = (tuple(token % 64 for token in draw_ids(length, 5)) for length in (90, 120))
LAST = worker_pb2.PromptPart(token_ids=[1, 2, 3], serving=worker_pb2.PART_SERVING_LIVE)
DEMO = Path(__file__).parents[2] / "models" / "demo"
_CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ServedWorker:
    """A worker with a stub of the cache service."""

    stub: "worker_pb2_grpc.WorkerServiceAsyncStub"
    engine: EngineThread
    cache: StubCache
    registry: CollectorRegistry

    async def generate(
        self, *parts: worker_pb2.PromptPart, max_tokens: int = 3, refresh: worker_pb2.Refresh | None = None
    ) -> list[worker_pb2.GenerateEvent]:
        """All events."""
        return [event async for event in self.start(*parts, max_tokens=max_tokens, refresh=refresh)]

    def start(
        self, *parts: worker_pb2.PromptPart, max_tokens: int = 3, refresh: worker_pb2.Refresh | None = None
    ) -> "grpc.aio.UnaryStreamCall[worker_pb2.GenerateRequest, worker_pb2.GenerateEvent]":
        """The call."""
        sampling = worker_pb2.Sampling(max_tokens=max_tokens)
        request = worker_pb2.GenerateRequest(parts=[*parts, LAST], sampling=sampling, refresh=refresh)
        return self.stub.Generate(request, timeout=_CALL_SECONDS)

    async def holds(self, key: bytes) -> bool:
        """Whether the engine has a state under a key."""
        return await self.engine.call(lambda engine: key in engine.context.store)

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 before there is one."""
        return self.registry.get_sample_value(f"hypic_worker_{name}", labels) or 0.0


def ordered(key: bytes, ids: tuple[int, ...], fence: int) -> worker_pb2.PromptPart:
    part = worker_pb2.PromptPart(token_ids=ids, serving=worker_pb2.PART_SERVING_SEGMENT, key=key)
    part.capture.CopyFrom(worker_pb2.TicketRef(ticket_id=f"ticket-{fence}", fence=fence))
    return part


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[ServedWorker]:
    write_random_checkpoint(tmp_path, DEMO)
    settings = WorkerSettings(checkpoint=tmp_path, page_bytes=16 << 20, state_bytes=64 << 20)
    served = read_served_model(settings)
    engine = EngineThread(lambda: build_engine(settings, served), lambda error: None)
    await engine.start()
    cache, registry = StubCache(), CollectorRegistry()
    cache_server, cache_port = await create_server(
        [lambda server: cache_pb2_grpc.add_CacheServiceServicer_to_server(cache, server)], "127.0.0.1:0", HealthSwitch()
    )
    cache_channel = create_channel(f"127.0.0.1:{cache_port}")
    identity = WorkerIdentity("w", "127.0.0.1:1", served.revision, served.profile_digest, "host")
    metrics = WorkerMetrics(registry)
    peers = PeerStates(served, "127.0.0.1:1", ByteBudget(1 << 26), shares_memory=True)
    tiers = TieredStates(engine, served, BlobTiers(served, [], metrics))
    residency = Residency(engine, CacheClient(cache_channel, identity), "host", tiers)
    transfers = Transfers(engine, served, tiers, peers, residency, metrics, _CALL_SECONDS)
    service = WorkerService(served, WorkerPlace("w"), engine, residency, transfers, metrics)
    server, port = await create_server(
        [lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)],
        "127.0.0.1:0",
        HealthSwitch(),
    )
    channel = create_channel(f"127.0.0.1:{port}")
    yield ServedWorker(worker_pb2_grpc.WorkerServiceStub(channel), engine, cache, registry)
    await engine.call(lambda running: running.check_integrity())
    await channel.close()
    await server.stop(0)
    await cache_channel.close()
    await cache_server.stop(0)
    engine.stop()


async def test_a_refresh_is_served_counted_and_bounded_by_its_budget(worker: ServedWorker) -> None:
    """Without bound it says what a prompt without states says. Nothing is refreshed under a budget that is used up."""
    live = [worker_pb2.PromptPart(token_ids=ids, serving=LAST.serving) for ids in (IDS, OTHER_IDS)]
    expected = [token for event in await worker.generate(*live) for token in event.tokens.token_ids]
    states = [ordered(KEY, IDS, 7), ordered(OTHER, OTHER_IDS, 8)]
    await worker.generate(*states)
    for refresh in (worker_pb2.Refresh(blocks=1 << 20), worker_pb2.Refresh(budget_seconds=1e6)):
        events = await worker.generate(*states, refresh=refresh)
        assert [token for event in events for token in event.tokens.token_ids] == expected
        parts = events[0].prefilled.parts
        assert [part.live_tokens for part in parts] == [90, 120, 3]
        assert all(part.refreshed_tokens for part in parts[:2])
    one = (await worker.generate(*states, refresh=worker_pb2.Refresh(blocks=1)))[0].prefilled.parts
    assert sum(part.refreshed_tokens for part in one) in range(1, 17)
    late = (await worker.generate(*states, refresh=worker_pb2.Refresh(budget_seconds=1e-6)))[0].prefilled.parts
    assert not any(part.refreshed_tokens for part in late)
    with pytest.raises(grpc.aio.AioRpcError, match=r"refresh\.budget_seconds"):
        await worker.generate(*states, refresh=worker_pb2.Refresh(budget_seconds=-1.0))


async def test_each_state_is_published_once_under_its_ticket(worker: ServedWorker) -> None:
    """A segment that stands twice is one state; counts, metrics and the reply agree."""
    again = worker_pb2.PromptPart(token_ids=IDS, serving=worker_pb2.PART_SERVING_SEGMENT, key=KEY)
    events = await worker.generate(ordered(KEY, IDS, 7), ordered(OTHER, OTHER_IDS, 8), again)
    assert [event.WhichOneof("event") for event in events] == ["prefilled", "tokens", "tokens", "tokens", "finished"]
    published = sorted((each.ticket_id, each.fence, each.key) for each in worker.cache.published)
    assert published == [("ticket-7", 7, KEY), ("ticket-8", 8, OTHER)]
    parts = events[0].prefilled.parts
    assert {part.serving for part in parts[:3]} == {worker_pb2.PART_SERVING_SEGMENT}
    assert [part.live_tokens + part.reused_tokens + part.captured_tokens for part in parts] == [90, 120, 90, 3]
    assert [bool(part.captured_tokens) for part in parts] == [True, True, False, False]
    assert [bool(part.reused_tokens) for part in parts] == [False, False, True, False]
    captured = sum(part.captured_tokens for part in parts)
    assert worker.metric("prompt_tokens_total", served="captured") == captured
    assert worker.metric("prompt_tokens_total", served="segment") == parts[2].reused_tokens
    assert worker.metric("captures_total", outcome="stored") == 2
    assert worker.metric("capture_time_seconds_count") == 2


async def test_warm_answers_are_the_cold_ones(worker: ServedWorker) -> None:
    cold = await worker.generate(ordered(KEY, IDS, 1), max_tokens=8)
    hit = worker_pb2.PromptPart(token_ids=IDS, serving=worker_pb2.PART_SERVING_SEGMENT, key=KEY)
    warm = await worker.generate(hit, max_tokens=8)
    assert warm[0].prefilled.parts[0].reused_tokens == cold[0].prefilled.parts[0].captured_tokens
    assert [event.tokens for event in warm] == [event.tokens for event in cold]
    assert len(worker.cache.published) == 1


async def test_what_is_ordered_anew_is_computed_anew(worker: ServedWorker) -> None:
    """The directory does not list it any more: it may have been revoked."""
    for fence in (1, 2):
        events = await worker.generate(ordered(KEY, IDS, fence))
        assert events[0].prefilled.parts[0].captured_tokens
    assert [each.fence for each in worker.cache.published] == [1, 2]
    assert worker.metric("captures_total", outcome="stored") == 2


async def test_no_token_waits_for_the_directory_and_nothing_unpublished_stays(worker: ServedWorker) -> None:
    worker.cache.publish_delay_seconds = 2 * _CALL_SECONDS
    call = worker.start(ordered(KEY, IDS, 1), max_tokens=500)
    kinds = [(await anext(aiter(call))).WhichOneof("event") for _ in range(2)]
    assert kinds == ["prefilled", "tokens"]
    assert await worker.holds(KEY)
    call.cancel()
    for _ in range(1000):
        if not await worker.holds(KEY):
            break
        await asyncio.sleep(0.02)
    assert not await worker.holds(KEY)
    assert worker.cache.published == []


async def test_only_segments_are_captured(worker: ServedWorker) -> None:
    part = ordered(KEY, IDS, 1)
    part.serving = worker_pb2.PART_SERVING_LIVE
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await worker.generate(part)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "parts[0].capture" in str(refused.value.details())
