"""`python -m bench.store --out FILE`: plans through the real cache service, and eviction policies on traces."""

import argparse
import asyncio
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from bench.results import Row, merge_results
from bench.store.contract import measure_contract
from bench.store.load import Latencies, percentile, run_closed, run_open
from bench.store.policies import load_traces, measure_policies
from bench.store.redis_alone import RedisRate, measure_redis
from bench.store.service import Served, Shape, draw_plans, fill, serve

_REACH_MS = {"memory": 8.0, "redis": 15.0}
_PLANS, _POLICIES, _CONTRACT = "plans_", "policies", "contract"
_SUBJECTS = (*(f"{_PLANS}{directory}" for directory in _REACH_MS), _POLICIES, _CONTRACT)


@dataclass(frozen=True, slots=True)
class Load:
    """By schedule: `rate` requests a second for `seconds`; all the time: `at_once` clients until `plans` are made."""

    rate: float = 200.0
    seconds: int = 20
    plans: int = 3000
    at_once: int = 16


async def measure_service(directory: str, shape: Shape, load: Load) -> list[Row]:
    """All rows of one directory."""
    async with serve(directory) as served:
        fill_seconds = await fill(served, shape)
        await run_closed(served, draw_plans(shape, load.plans // 10, seed=1), load.at_once)
        scheduled = draw_plans(shape, int(load.rate * load.seconds), seed=2)
        opened = await run_open(served, scheduled, load.rate, seed=3)
        closed = await run_closed(served, draw_plans(shape, load.plans, seed=4), load.at_once)
        single = await run_closed(served, draw_plans(replace(shape, parts=1), load.plans, seed=5), load.at_once)
        rows = [*_open_rows(directory, shape, load, opened), *_closed_rows(directory, shape, load, closed)]
        rows.append(Row(f"plans, {directory}, 1 part, {load.at_once} requests at once", single.rate, "1/s"))
        rows.append(Row(f"publishes, {directory}", shape.entries / fill_seconds, "1/s"))
        return [*rows, *_redis_rows(served, closed, shape)]


def _open_rows(directory: str, shape: Shape, load: Load, opened: Latencies) -> Iterator[Row]:
    at_rate = f"{directory}, {shape.parts} parts, {load.rate:.0f} requests a second"
    reach = _REACH_MS[directory]
    yield Row(f"plan p99, {at_rate}", 1000 * percentile(opened.each, 0.99), "ms", reach, better="lower")
    yield Row(f"plan p50, {at_rate}", 1000 * percentile(opened.each, 0.5), "ms", better="lower")
    processes = {"service": opened.service_seconds, "load": opened.load_seconds, "Redis": opened.redis_seconds}
    for process, seconds in processes.items():
        if seconds:
            each = 1000 * seconds / opened.num_plans
            yield Row(f"{process}'s processor time a request, {at_rate}", each, "ms", better="lower")
    yield Row(f"calls refused, {at_rate}", opened.num_refused, "", 0.0, better="lower")


def _closed_rows(directory: str, shape: Shape, load: Load, closed: Latencies) -> Iterator[Row]:
    at_once = f"{directory}, {shape.parts} parts, {load.at_once} requests at once"
    yield Row(f"plans, {at_once}", closed.rate, "1/s")
    yield Row(f"plan p99, {at_once}", 1000 * percentile(closed.each, 0.99), "ms", better="lower")


def _redis_rows(served: Served, closed: Latencies, shape: Shape) -> Iterator[Row]:
    if served.redis is None:
        return
    alone: RedisRate = measure_redis(served.redis)
    yield Row(f"Redis alone, GET ({alone.how})", alone.rate, "1/s")
    yield Row("parts planned a second over GETs a second, redis", closed.rate * shape.parts / alone.rate, "×")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subjects", nargs="*", choices=[[], *_SUBJECTS], help="all of them without any")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--entries", type=int, default=Shape().entries, help="in the directory")
    parser.add_argument("--seconds", type=int, default=Load().seconds, help="of the load by schedule")
    parser.add_argument(
        "--trace", type=Path, action="append", default=[], help="a trace for the policies; several times"
    )
    arguments = parser.parse_args()
    shape = replace(Shape(), entries=arguments.entries)
    load = replace(Load(), seconds=arguments.seconds)
    device = f"CPU, {os.cpu_count()} cores, {platform.machine()}"
    command = " ".join(["python -m bench.store", *sys.argv[1:]])
    for subject in arguments.subjects or _SUBJECTS:
        if subject == _POLICIES:
            rows = list(measure_policies(load_traces(arguments.trace)))
        elif subject == _CONTRACT:
            rows = list(measure_contract())
        else:
            # As in the router, whose client the load goes through.
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                rows = runner.run(measure_service(subject.removeprefix(_PLANS), shape, load))
        keep(arguments.out, command, device, subject, rows)


def keep(out: Path, command: str, device: str, subject: str, rows: list[Row]) -> None:
    """Write a subject's rows and print them."""
    merge_results(out, command, device, subject, rows)
    for row in rows:
        print(f"{row.value:12.4g} {row.unit:4} {row.measure}", flush=True)


if __name__ == "__main__":
    main()
