"""The way between workers: a state read by `Fetch` out of a real worker's process, timed on the clock."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import grpc
from hypic.v1 import cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc

from bench.engine_runs import token_ids
from services.cli.ports import free_port, grpc_ready
from services.simulator.costs import WayCosts

__all__ = ["measure_fetches"]

_START_SECONDS = 60.0
_CALL_SECONDS = 60.0


def measure_fetches(checkpoint: Path, segment_tokens: int = 2048, rounds: int = 9) -> WayCosts:
    """The least time until the first chunk, and the bytes a second behind it.

    Raises:
        RuntimeError: a service did not start, or the segment was not stored.
    """
    return asyncio.run(_measure(checkpoint, segment_tokens, rounds))


async def _measure(checkpoint: Path, segment_tokens: int, rounds: int) -> WayCosts:
    with _processes(checkpoint) as (cache_address, worker_address):
        for address in (cache_address, worker_address):
            await _await_ready(address)
        async with (
            grpc.aio.insecure_channel(cache_address) as cache_channel,
            grpc.aio.insecure_channel(worker_address) as worker_channel,
        ):
            worker = worker_pb2_grpc.WorkerServiceStub(worker_channel)
            key = await _capture(cache_pb2_grpc.CacheServiceStub(cache_channel), worker, segment_tokens)
            fetched = [await _fetch(worker, key) for _ in range(rounds)]
    latency = min(first for first, _, _ in fetched)
    rate = max(num_bytes / seconds for _, seconds, num_bytes in fetched)
    return WayCosts(latency, rate)


async def _capture(
    cache: "cache_pb2_grpc.CacheServiceAsyncStub", worker: "worker_pb2_grpc.WorkerServiceAsyncStub", segment_tokens: int
) -> bytes:
    """A new segment's key, planned and captured as a router would."""
    described = [answer async for answer in worker.Describe(worker_pb2.DescribeRequest(), timeout=_CALL_SECONDS)]
    info = described[0].info
    entry = cache_pb2.PlanEntry(
        kind=cache_pb2.ENTRY_KIND_SEGMENT, content_hash=sha256(b"bench").digest(), num_tokens=segment_tokens
    )
    wanted = cache_pb2.PlanRequest(
        request_id="bench",
        namespace=cache_pb2.Namespace(tenant="bench"),
        model=info.model_revision,
        profile_digest=info.profile.digest,
        entries=[entry],
        lease_seconds=_CALL_SECONDS,
    )
    (plan,) = [answer async for answer in cache.Plan(iter([wanted]), timeout=_CALL_SECONDS)]
    planned = plan.entries[0]
    segment = worker_pb2.CaptureSegment(
        key=planned.key,
        token_ids=token_ids(1, segment_tokens, info.vocab_size),
        ticket=worker_pb2.TicketRef(ticket_id=planned.ticket.ticket_id, fence=planned.ticket.fence),
    )
    request = worker_pb2.CaptureRequest(request_id="bench", segments=[segment])
    async for event in worker.Capture(request, timeout=_CALL_SECONDS):
        if event.outcome != worker_pb2.CAPTURE_OUTCOME_STORED:
            raise RuntimeError(f"the segment was not stored: {event.reason}")
    return bytes(planned.key)


async def _fetch(worker: "worker_pb2_grpc.WorkerServiceAsyncStub", key: bytes) -> tuple[float, float, int]:
    """Seconds until the first chunk, seconds behind it, bytes behind it."""
    began = time.perf_counter()
    first: float | None = None
    num_bytes = 0
    async for chunk in worker.Fetch(worker_pb2.FetchRequest(key=key), timeout=_CALL_SECONDS):
        if first is None:
            first = time.perf_counter()
        else:
            num_bytes += len(chunk.data)
    if first is None or not num_bytes:
        raise RuntimeError("the state has too few bytes to be timed")
    return first - began, time.perf_counter() - first, num_bytes


@contextmanager
def _processes(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """`hypic cache` and `hypic worker`, by address."""
    cache, worker = (f"127.0.0.1:{free_port()}" for _ in range(2))
    variables = {
        "HYPIC_CACHE_LISTEN_ADDRESS": cache,
        "HYPIC_CACHE_SECRET": "the secret of a benchmark",
        "HYPIC_CACHE_LOG_LEVEL": "warning",
        "HYPIC_WORKER_CACHE_ADDRESS": cache,
        "HYPIC_WORKER_LISTEN_ADDRESS": worker,
        "HYPIC_WORKER_CHECKPOINT": str(checkpoint),
        "HYPIC_WORKER_LOG_LEVEL": "warning",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    processes = [
        subprocess.Popen([sys.executable, "-m", "services.cli.main", name], env=os.environ | variables)
        for name in ("cache", "worker")
    ]
    try:
        yield cache, worker
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


async def _await_ready(address: str) -> None:
    give_up = time.monotonic() + _START_SECONDS
    while not await grpc_ready(address):
        if time.monotonic() > give_up:
            raise RuntimeError(f"the service at {address} is not ready in time; its log says why")
        await asyncio.sleep(0.1)
