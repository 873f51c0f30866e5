"""A worker over a tiny model that captures, combines and decodes over real gRPC, with a stub of the cache service."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from hypic.v1 import cache_pb2_grpc, worker_pb2, worker_pb2_grpc
from prometheus_client import CollectorRegistry

from services.common.content import HASH_BYTES
from services.common.rpc import HealthSwitch, create_channel, create_server
from services.router.adapters.generate_stream import GenerateCall, GenerateStream
from services.worker.adapters.blob_tiers import BlobTiers
from services.worker.adapters.byte_budget import ByteBudget
from services.worker.adapters.cache_client import CacheClient, WorkerIdentity
from services.worker.adapters.description import WorkerPlace
from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.held_states import HeldStates, HoldLimits
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
CALL_SECONDS = 30.0
HOLD_LIMITS = HoldLimits(seconds=CALL_SECONDS, num_bytes=1 << 26, fetch_bytes=1 << 26)


@dataclass(frozen=True, slots=True)
class ServedWorker:
    """A worker with a stub of the cache service."""

    stub: "worker_pb2_grpc.WorkerServiceAsyncStub"
    stream: GenerateStream
    engine: EngineThread
    cache: StubCache
    registry: CollectorRegistry

    async def generate(
        self, *parts: worker_pb2.PromptPart, max_tokens: int = 3, refresh: worker_pb2.Refresh | None = None
    ) -> list[worker_pb2.GenerateEvent]:
        """All events."""
        return await all_events(self.start(*parts, max_tokens=max_tokens, refresh=refresh))

    def start(
        self, *parts: worker_pb2.PromptPart, max_tokens: int = 3, refresh: worker_pb2.Refresh | None = None
    ) -> GenerateCall:
        """The call."""
        sampling = worker_pb2.Sampling(max_tokens=max_tokens)
        request = worker_pb2.GenerateRequest(parts=[*parts, LAST], sampling=sampling, refresh=refresh)
        return self.stream.begin(request_writer(request), CALL_SECONDS)

    async def end_turn(self, stop: int = 5) -> bytes:
        """The key under which the state behind a reply of some tokens is held; they end with that stop token."""
        sampling = worker_pb2.Sampling(max_tokens=12, min_tokens=4, stop_token_ids=[5])
        sampling.logit_bias.add(token_id=5, bias=100.0)
        request = worker_pb2.GenerateRequest(parts=[LAST], sampling=sampling, closing_token_ids=[stop, 9])
        events = await all_events(self.stream.begin(request_writer(request), CALL_SECONDS))
        assert events[-1].finished.reason == worker_pb2.FINISH_REASON_STOP
        return events[-1].finished.held_key

    async def keep(self, held_key: bytes, key: bytes = KEY, fence: int = 3) -> str:
        """Why it is not kept; empty when it is."""
        ticket = worker_pb2.TicketRef(ticket_id="turn", fence=fence)
        request = worker_pb2.KeepRequest(held_key=held_key, key=key, ticket=ticket)
        return str((await self.stub.Keep(request, timeout=CALL_SECONDS)).reason)

    async def until_gone(self, key: bytes) -> None:
        """The engine has no state under a key any more."""
        for _ in range(1000):
            if not await self.holds(key):
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the state is still there")

    async def holds(self, key: bytes) -> bool:
        """Whether the engine has a state under a key."""
        return await self.engine.call(lambda engine: key in engine.context.store)

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value; 0 before there is one."""
        return self.registry.get_sample_value(f"hypic_worker_{name}", labels) or 0.0


def request_writer(request: worker_pb2.GenerateRequest) -> Callable[[worker_pb2.GenerateRequest], None]:
    """Fills in a request that is made already."""
    return lambda message: message.CopyFrom(request)


async def all_events(call: GenerateCall) -> list[worker_pb2.GenerateEvent]:
    """Until the call's end."""
    events = []
    try:
        while not call.has_ended:
            events.append(await call.next())
    finally:
        call.leave()
    return events


@asynccontextmanager
async def run_worker(
    directory: Path, limits: HoldLimits = HOLD_LIMITS, turn_seconds: float = CALL_SECONDS
) -> AsyncIterator[ServedWorker]:
    """The worker; engine and memory must add up at the end."""
    write_random_checkpoint(directory, DEMO)
    settings = WorkerSettings(checkpoint=directory, page_bytes=16 << 20, state_bytes=64 << 20)
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
    transfers = Transfers(engine, served, tiers, peers, residency, metrics, CALL_SECONDS)
    held = HeldStates(engine, served, True, limits, metrics, tiers.threads)
    place = WorkerPlace("w", turn_seconds=turn_seconds)
    service = WorkerService(served, place, engine, residency, transfers, held, metrics)
    server, port = await create_server(
        [lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)],
        "127.0.0.1:0",
        HealthSwitch(),
    )
    channel = create_channel(f"127.0.0.1:{port}")
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    yield ServedWorker(stub, GenerateStream(stub), engine, cache, registry)
    await engine.call(lambda running: running.check_integrity())
    await channel.close()
    await server.stop(0)
    await cache_channel.close()
    await cache_server.stop(0)
    engine.stop()
