"""A running cache service over real gRPC, as tests call it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypic.v1 import cache_pb2 as pb
from hypic.v1 import cache_pb2_grpc
from prometheus_client import CollectorRegistry

from services.cache.bootstrap import start
from services.cache.settings import CacheSettings
from services.common.rpc import create_channel

__all__ = ["DEADLINE_SECONDS", "DOCUMENT", "NOT_SERVING", "SECRET", "SEGMENT", "SERVING", "Service", "running"]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
DOCUMENT = pb.DocumentRef(id="d", digest=b"d" * 32)
SEGMENT = pb.PlanEntry(kind=pb.ENTRY_KIND_SEGMENT, content_hash=b"c" * 32, num_tokens=1)
SECRET = "a secret of the tests"
DEADLINE_SECONDS = 10.0


@dataclass(slots=True)
class Service:
    stub: "cache_pb2_grpc.CacheServiceAsyncStub"
    health: Any
    registry: CollectorRegistry

    async def status(self, name: str) -> int:
        reply = await self.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_SECONDS)
        return int(reply.status)

    async def plan(self, lease_id: str = "") -> pb.PlanResponse:
        entry = pb.PlanEntry(kind=pb.ENTRY_KIND_SEGMENT, content_hash=b"c" * 32, num_tokens=400, documents=[DOCUMENT])
        message = pb.PlanRequest(
            namespace=pb.Namespace(tenant="acme"), model="m", profile_digest="p", entries=[entry], lease_id=lease_id
        )
        return await self.ask(message)

    async def ask(self, message: pb.PlanRequest) -> pb.PlanResponse:
        """The answer on a stream of its own."""
        (response,) = [one async for one in self.stub.Plan(iter([message]), timeout=DEADLINE_SECONDS)]
        return response

    async def publish(self, planned: pb.PlannedEntry, size_bytes: int = 1000) -> pb.PublishResponse:
        message = pb.PublishRequest(
            key=planned.key,
            ticket_id=planned.ticket.ticket_id,
            fence=planned.ticket.fence,
            worker_id="w1",
            tier="host",
            size_bytes=size_bytes,
        )
        return await self.stub.Publish(message, timeout=DEADLINE_SECONDS)

    async def register(self, digest: bytes = b"d" * 32, tags: list[str] | None = None) -> pb.RegisterDocumentResponse:
        message = pb.RegisterDocumentRequest(
            namespace=pb.Namespace(tenant="acme"),
            document=pb.DocumentRef(id="d", digest=digest),
            title="Title",
            tags=tags or [],
            num_tokens=400,
        )
        return await self.stub.RegisterDocument(message, timeout=DEADLINE_SECONDS)

    async def beat(self, *resident: pb.ResidentEntry) -> pb.HeartbeatResponse:
        message = pb.HeartbeatRequest(worker_id="w1", address="10.0.0.1:7201", resident=resident)
        return await self.stub.Heartbeat(message, timeout=DEADLINE_SECONDS)


@asynccontextmanager
async def running(settings: CacheSettings) -> AsyncIterator[Service]:
    registry = CollectorRegistry()
    process = await start(settings, registry)
    try:
        async with create_channel(process.address) as channel:
            yield Service(cache_pb2_grpc.CacheServiceStub(channel), health_pb2_grpc.HealthStub(channel), registry)
    finally:
        await process.stop(0.0)
