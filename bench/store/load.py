"""Loads for the cache service: as many plans as it answers, and arrivals by a schedule that does not wait for it.

Calls go through the router's own client, whose releases nobody waits for.
"""

import asyncio
import gc
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.store.service import Served, cpu_seconds
from services.common.errors import HypicError
from services.router.background import Background
from services.router.domain.ports import PlanQuery

__all__ = ["Latencies", "percentile", "run_closed", "run_open"]

_CALL_SECONDS = 30.0
# A router releases behind the first token.
_HELD_SECONDS = 0.3


@dataclass(slots=True)
class Latencies:
    """Seconds of every answered plan, in all, and processor seconds of each process for all plans with their releases.

    num_refused: plans that were answered with an error, as an overloaded directory does.
    """

    each: list[float] = field(default_factory=list)
    elapsed_seconds: float = 0.0
    service_seconds: float = 0.0
    redis_seconds: float = 0.0
    load_seconds: float = 0.0
    num_refused: int = 0

    @property
    def rate(self) -> float:
        """Plans a second."""
        return len(self.each) / self.elapsed_seconds

    @property
    def num_plans(self) -> int:
        """Answered and refused."""
        return len(self.each) + self.num_refused


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all values does not exceed."""
    return sorted(values)[max(math.ceil(len(values) * share) - 1, 0)]


async def run_closed(served: Served, plans: Sequence[PlanQuery], at_once: int) -> Latencies:
    """Every plan, a fixed number of clients one after the other; each plan's release goes on behind the next one."""
    queue, latencies, background = iter(plans), Latencies(), Background(0)

    async def client() -> None:
        for plan in queue:
            sent = time.perf_counter()
            reply = await served.directory.plan(plan, _CALL_SECONDS)
            latencies.each.append(time.perf_counter() - sent)
            background.spawn(served.directory.release(reply.lease_id, _CALL_SECONDS))

    with _timed(served, latencies):
        await asyncio.gather(*(client() for _ in range(at_once)))
        await background.close(_CALL_SECONDS)
    return latencies


async def run_open(served: Served, plans: Sequence[PlanQuery], rate: float, seed: int) -> Latencies:
    """Plans at exponential intervals, `rate` a second; a latency counts from the second at which its plan was due."""
    source, latencies = random.Random(seed), Latencies()

    async def arrive(plan: PlanQuery, due: float) -> None:
        try:
            reply = await served.directory.plan(plan, _CALL_SECONDS)
            latencies.each.append(time.perf_counter() - due)
            await asyncio.sleep(_HELD_SECONDS)
            await served.directory.release(reply.lease_id, _CALL_SECONDS)
        except HypicError:
            latencies.num_refused += 1

    # A collection that walks all these plans stops this process for 0.1 s, which no router's requests would see.
    gc.collect()
    gc.freeze()
    with _timed(served, latencies):
        due = time.perf_counter()
        async with asyncio.TaskGroup() as arrivals:
            for plan in plans:
                due += source.expovariate(rate)
                await asyncio.sleep(max(due - time.perf_counter(), 0))
                arrivals.create_task(arrive(plan, due))
    return latencies


@contextmanager
def _timed(served: Served, latencies: Latencies) -> Iterator[None]:
    """Fill in the seconds of what runs inside."""

    def read() -> tuple[float, float, float, float]:
        redis = cpu_seconds(served.redis.pid) if served.redis else 0.0
        return time.perf_counter(), cpu_seconds(served.pid), redis, time.process_time()

    before = read()
    yield
    spent = [late - early for early, late in zip(before, read(), strict=True)]
    latencies.elapsed_seconds, latencies.service_seconds, latencies.redis_seconds, latencies.load_seconds = spent
