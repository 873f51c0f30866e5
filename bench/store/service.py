"""The cache service as its own process over either directory, filled through its own calls."""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

from hypic.v1 import cache_pb2 as pb
from hypic.v1 import cache_pb2_grpc

from services.cli.ports import free_port, grpc_ready
from services.common.rpc import create_channel
from services.router.adapters.clients import GrpcDirectory
from services.router.domain.plan import CacheEntry, EntryKind, Outcome
from services.router.domain.ports import PlanAnswer, PlanQuery
from services.router.domain.request import Namespace
from tests.redis_server import RedisServer

__all__ = ["Served", "Shape", "cpu_seconds", "draw_plans", "fill", "serve"]

_START_SECONDS = 30.0
_PLANNED_AT_ONCE = 200
_PUBLISHED_AT_ONCE = 32
_CALL_SECONDS = 30.0
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Shape:
    """What the directory holds and what is asked: plans of so many parts, documents by Zipf's law within a tenant."""

    entries: int = 100_000
    tenants: int = 20
    workers: int = 50
    tokens: int = 512
    size_bytes: int = 1 << 20
    parts: int = 32
    new_share: float = 0.05
    exponent: float = 0.8


@dataclass(frozen=True, slots=True)
class Served:
    """A running service: a worker's calls, a router's, its process, and Redis where it uses one."""

    stub: "cache_pb2_grpc.CacheServiceAsyncStub"
    directory: GrpcDirectory
    pid: int
    redis: RedisServer | None


@asynccontextmanager
async def serve(directory: str) -> AsyncIterator[Served]:
    """`hypic cache` over `memory` or `redis`, with no other limit than the machine's."""
    with _start(directory) as running:
        await _await_ready(running.address)
        async with create_channel(running.address) as channel:
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            yield Served(stub, GrpcDirectory(channel), running.pid, running.redis)


@dataclass(frozen=True, slots=True)
class _Running:
    address: str
    pid: int
    redis: RedisServer | None


@contextmanager
def _start(directory: str) -> Iterator[_Running]:
    with tempfile.TemporaryDirectory(prefix="hypic-bench-") as folder:
        server = RedisServer(Path(folder)) if directory == "redis" else None
        if server:
            server.start()
        address = f"127.0.0.1:{free_port()}"
        variables = {
            "HYPIC_CACHE_LISTEN_ADDRESS": address,
            "HYPIC_CACHE_DIRECTORY": directory,
            "HYPIC_CACHE_REDIS_URL": server.url if server else "redis://unused",
            "HYPIC_CACHE_SECRET": "the secret of a benchmark",
            "HYPIC_CACHE_BUDGET_BYTES": str(1 << 50),
            "HYPIC_CACHE_WORKER_TTL_SECONDS": "3600",
            "HYPIC_CACHE_LOG_LEVEL": "warning",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        process = subprocess.Popen([sys.executable, "-m", "services.cli.main", "cache"], env=os.environ | variables)
        try:
            yield _Running(address, process.pid, server)
        finally:
            process.terminate()
            process.wait()
            if server:
                server.stop()


async def _await_ready(address: str) -> None:
    give_up = time.monotonic() + _START_SECONDS
    while not await grpc_ready(address):
        if time.monotonic() > give_up:
            raise RuntimeError("the cache service is not ready in time; its log says why")
        await asyncio.sleep(0.1)


async def fill(served: Served, shape: Shape) -> float:
    """Plan and publish every entry, as a router and its workers do; the seconds that it took."""
    started = time.perf_counter()
    workers = [f"worker-{number}" for number in range(shape.workers)]
    for worker in workers:
        await served.stub.Heartbeat(pb.HeartbeatRequest(worker_id=worker, address=f"{worker}:1"), timeout=_CALL_SECONDS)
    for tenant in range(shape.tenants):
        documents = range(shape.entries // shape.tenants)
        for first in documents[::_PLANNED_AT_ONCE]:
            chosen = documents[first : first + _PLANNED_AT_ONCE]
            plan = await served.directory.plan(plan_query(tenant, map(str, chosen), shape), _CALL_SECONDS)
            await _publish(served, shape, plan, workers)
            await served.directory.release(plan.lease_id, _CALL_SECONDS)
    return time.perf_counter() - started


async def _publish(served: Served, shape: Shape, plan: PlanAnswer, workers: Sequence[str]) -> None:
    gate = asyncio.Semaphore(_PUBLISHED_AT_ONCE)

    async def publish(planned: Outcome) -> None:
        if planned.ticket is None:
            raise RuntimeError("a document that is stored for the first time has no ticket")
        request = pb.PublishRequest(
            key=planned.key,
            ticket_id=planned.ticket.ticket_id,
            fence=planned.ticket.fence,
            worker_id=workers[planned.key[0] % len(workers)],
            tier="host",
            size_bytes=shape.size_bytes,
        )
        async with gate:
            reply = await served.stub.Publish(request, timeout=_CALL_SECONDS)
        if reply.outcome != pb.PUBLISH_OUTCOME_ACCEPTED:
            raise RuntimeError(f"a publish was answered with {pb.PublishOutcome.Name(reply.outcome)}")

    await asyncio.gather(*map(publish, plan.outcomes))


def plan_query(tenant: int, names: Iterable[str], shape: Shape) -> PlanQuery:
    """A plan for documents of a tenant."""
    hashes = (sha256(name.encode()).digest() for name in names)
    return PlanQuery(
        request_id="bench",
        namespace=Namespace(f"tenant-{tenant}"),
        model="model",
        profile_digest="profile",
        entries=tuple(CacheEntry(EntryKind.SEGMENT, one, shape.tokens) for one in hashes),
        lease_seconds=30.0,
    )


def draw_plans(shape: Shape, count: int, seed: int) -> list[PlanQuery]:
    """Plans of one tenant each, every one of distinct documents, some of which nobody has asked for."""
    source = random.Random(seed)
    documents = shape.entries // shape.tenants
    weights = list(accumulate(1 / (rank + 1) ** shape.exponent for rank in range(documents)))
    plans = []
    for number in range(count):
        names: set[str] = set()
        while len(names) < shape.parts:
            is_new = source.random() < shape.new_share
            known = source.choices(range(documents), cum_weights=weights)[0]
            names.add(f"new-{seed}-{number}-{len(names)}" if is_new else str(known))
        plans.append(plan_query(source.randrange(shape.tenants), sorted(names), shape))
    return plans


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS
