"""Loads for the cache service: as many plans as it answers, and arrivals by a schedule that does not wait for it."""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from hypic.v1 import cache_pb2 as pb

from bench.store.service import Served, cpu_seconds

__all__ = ["Latencies", "percentile", "run_closed", "run_open"]

_CALL_SECONDS = 30.0
# A router releases behind the first token.
_HELD_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of every answered plan, in all, and processor seconds of the service a plan with its release.

    num_refused: plans that were answered with an error, as an overloaded directory does.
    """

    each: tuple[float, ...]
    elapsed_seconds: float
    service_seconds: float
    num_refused: int = 0

    @property
    def rate(self) -> float:
        """Plans a second."""
        return len(self.each) / self.elapsed_seconds


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all values does not exceed."""
    return sorted(values)[max(math.ceil(len(values) * share) - 1, 0)]


async def run_closed(served: Served, plans: Sequence[pb.PlanRequest], at_once: int) -> Latencies:
    """Every plan and its release, a fixed number of clients one after the other."""
    queue, latencies = iter(plans), list[float]()
    before, started = cpu_seconds(served.pid), time.perf_counter()

    async def client() -> None:
        for plan in queue:
            sent = time.perf_counter()
            reply = await served.stub.Plan(plan, timeout=_CALL_SECONDS)
            latencies.append(time.perf_counter() - sent)
            await served.stub.Release(pb.ReleaseRequest(lease_id=reply.lease_id), timeout=_CALL_SECONDS)

    await asyncio.gather(*(client() for _ in range(at_once)))
    elapsed = time.perf_counter() - started
    return Latencies(tuple(latencies), elapsed, (cpu_seconds(served.pid) - before) / len(plans))


async def run_open(served: Served, plans: Sequence[pb.PlanRequest], rate: float, seed: int) -> Latencies:
    """Plans at exponential intervals, `rate` a second; a latency counts from the second at which its plan was due."""
    source, latencies, refused = random.Random(seed), list[float](), list[grpc.StatusCode]()
    before, started = cpu_seconds(served.pid), time.perf_counter()

    async def arrive(plan: pb.PlanRequest, due: float) -> None:
        try:
            reply = await served.stub.Plan(plan, timeout=_CALL_SECONDS)
            latencies.append(time.perf_counter() - due)
            await asyncio.sleep(_HELD_SECONDS)
            await served.stub.Release(pb.ReleaseRequest(lease_id=reply.lease_id), timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            refused.append(error.code())

    due = started
    async with asyncio.TaskGroup() as arrivals:
        for plan in plans:
            due += source.expovariate(rate)
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            arrivals.create_task(arrive(plan, due))
    elapsed = time.perf_counter() - started
    service_seconds = (cpu_seconds(served.pid) - before) / len(plans)
    return Latencies(tuple(latencies), elapsed, service_seconds, len(refused))
