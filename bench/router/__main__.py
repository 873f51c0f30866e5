"""`python -m bench.router --out FILE`: the router alone, or two (`--routers 2`), between a load that waits for nothing and stubs
that take no time.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from bench.results import Row, cpu_device, merge_results
from bench.router.load import Shape, Timings, make_requests, run_open
from bench.router.processes import RunningRouters, resident_bytes, serve_routers
from bench.store.load import percentile
from bench.store.service import cpu_seconds

_REACH_RATE = 300.0
_REACH_MS = 15.0
_REACH_GROWTH_MIB = 8.0
_SUBJECTS = {1: "alone", 2: "pair"}


@dataclass(frozen=True, slots=True)
class Plan:
    """Arrivals a second, how many are timed, and how many pass in all until memory is looked at again."""

    rate: float = 300.0
    timed: int = 10_000
    total: int = 100_000


@dataclass(frozen=True, slots=True)
class Measured:
    """Of the timed requests, with processor seconds of router and stubs; resident bytes after them, and after all."""

    timings: Timings
    router_seconds: float
    stubs_seconds: float
    resident_before: int
    resident_after: int
    num_failures: int
    token_seconds: float


async def measure(router: RunningRouters, plan: Plan, shape: Shape) -> Measured:
    """Warm up, time, then go on until all requests have passed."""
    requests = make_requests(shape)
    warm = await run_open(router.ports, requests, len(requests) + int(plan.rate), plan.rate / 3, seed=1)
    before = _cpu_seconds(router), cpu_seconds(router.stubs_pid)
    timings = await run_open(router.ports, requests, plan.timed, plan.rate, seed=2)
    router_seconds, stubs_seconds = _cpu_seconds(router) - before[0], cpu_seconds(router.stubs_pid) - before[1]
    resident_before = _largest(router)
    rest = await run_open(router.ports, requests, max(plan.total - plan.timed, 1), plan.rate, seed=3)
    resident_after = _largest(router)
    failures = [*warm.failures, *timings.failures, *rest.failures]
    for failure in failures[:3]:
        sys.stderr.write(f"failed: {failure}\n")
    token_seconds = await _token_seconds(router, plan, shape, router_seconds / plan.timed)
    return Measured(
        timings, router_seconds, stubs_seconds, resident_before, resident_after, len(failures), token_seconds
    )


def _cpu_seconds(routers: RunningRouters) -> float:
    return sum(map(cpu_seconds, routers.pids))


def _largest(routers: RunningRouters) -> int:
    return max(map(resident_bytes, routers.pids))


async def _token_seconds(router: RunningRouters, plan: Plan, shape: Shape, request_seconds: float) -> float:
    """Processor seconds of one more token in a reply."""
    longer = replace(shape, tokens=8 * shape.tokens)
    count = max(plan.timed // 10, 1)
    before = _cpu_seconds(router)
    await run_open(router.ports, make_requests(longer), count, plan.rate / 8, seed=4)
    return ((_cpu_seconds(router) - before) / count - request_seconds) / (longer.tokens - shape.tokens)


def rows_of(measured: Measured, plan: Plan, shape: Shape) -> Iterator[Row]:
    """What is aimed at first."""
    timings = measured.timings
    each = f"8 documents, {shape.tokens} tokens of reply"
    overhead = [1000 * percentile(timings.first_token, share) for share in (0.99, 0.5)]
    grown = (measured.resident_after - measured.resident_before) / 2**20
    count = plan.timed
    yield Row(f"requests a second, open loop ({each})", timings.rate, "1/s", _REACH_RATE)
    yield Row(f"p99 of the first token behind a worker that takes no time, {plan.rate:g} requests a second",
              overhead[0], "ms", _REACH_MS, better="lower")  # fmt: skip
    yield Row("p50 of the same", overhead[1], "ms", better="lower")
    yield Row(f"memory grown between {plan.timed:,} and {max(plan.total, plan.timed + 1):,} requests", grown, "MiB",
              _REACH_GROWTH_MIB, better="lower")  # fmt: skip
    yield Row("memory of the router after all requests", measured.resident_after / 2**20, "MiB", better="lower")
    yield Row("failed requests", measured.num_failures, "", 0.0, better="lower")
    yield Row("router's processor time a request", 1000 * measured.router_seconds / count, "ms", better="lower")
    yield Row("router's processor time a further token", 1e6 * measured.token_seconds, "µs", better="lower")
    yield Row("stubs' processor time a request", 1000 * measured.stubs_seconds / count, "ms", better="lower")


def main() -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.router", description=__doc__)
    parser.add_argument("--out", type=Path, help="result file; without it rows are printed only")
    usual = Plan()
    parser.add_argument("--rate", type=float, default=usual.rate, help="arrivals a second")
    parser.add_argument("--timed", type=int, default=usual.timed, help="requests whose times count")
    parser.add_argument("--total", type=int, default=usual.total, help="requests over which memory is to be flat")
    parser.add_argument("--routers", type=int, choices=sorted(_SUBJECTS), default=1, help="that share the load")
    arguments = parser.parse_args()
    plan, shape = Plan(arguments.rate, arguments.timed, arguments.total), Shape()
    with serve_routers(arguments.routers) as router, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(measure(router, plan, shape))
    rows = list(rows_of(measured, plan, shape))
    for row in rows:
        print(f"{row.value:10.4g} {row.unit:5} {row.measure}")
    if arguments.out:
        merge_results(
            arguments.out,
            " ".join(["python -m bench.router", *sys.argv[1:]]),
            cpu_device(),
            _SUBJECTS[arguments.routers],
            rows,
        )


if __name__ == "__main__":
    main()
