"""`python -m bench.guard --out FILE`: what the guard over composed answers costs traffic.

One worker with the demo model and two routers before it, one with the guard and one without, which get the same load in turn: a
pair of windows at a time, so that a slow moment of the machine meets both. A window begins when the guard has done with the one
before.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from bench.results import Row, cpu_device, merge_results
from bench.router.load import Shape, Timings, make_requests, run_open
from bench.router.processes import await_ready
from bench.store.load import percentile
from services.cli.orphans import SUPERVISOR_VARIABLE
from services.cli.ports import free_port
from services.cli.supervisor import Stack, StackOptions
from services.router.domain.guard import is_sampled

_CHECKPOINT = Path(__file__).resolve().parent.parent / "models" / "demo"
_SUBJECT = "guard"
_REACH = 1.05
_SETTLE_SECONDS = 120.0
_CALIBRATING = 12


@dataclass(frozen=True, slots=True)
class Plan:
    """share: that the guard looks at; load: of the rate at which requests are answered one at a time; requests: a window."""

    share: float
    load: float
    pairs: int
    requests: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The 95th percentile of the time to first token, in seconds."""

    guarded: float
    plain: float


@dataclass(frozen=True, slots=True)
class Measured:
    """rate: arrivals a second; samples: by what became of them."""

    pairs: tuple[Pair, ...]
    rate: float
    samples: dict[str, int]
    num_failures: int


class Bench:
    """Routers with and without the guard, by their ports."""

    def __init__(self, guarded: int, plain: int, plan: Plan, model: str) -> None:
        self._guarded, self._plain, self._plan = guarded, plain, plan
        self._requests = make_requests(Shape(libraries=4, model=model))
        self._num_guarded = self._num_failures = 0
        self._seed = 0

    async def run(self) -> Measured:
        """Calibrate, then measure pairs; which one goes first alternates."""
        await self._window(self._plain, len(self._requests), 4.0)
        started = time.perf_counter()
        for _ in range(_CALIBRATING):
            await self._window(self._plain, 1, 1e6)
        rate = self._plan.load * _CALIBRATING / (time.perf_counter() - started)
        pairs = []
        for number in range(self._plan.pairs):
            ports = (self._guarded, self._plain)[:: 1 if number % 2 else -1]
            found = {
                port: percentile((await self._window(port, self._plan.requests, rate)).first_token, 0.95)
                for port in ports
            }
            pairs.append(Pair(found[self._guarded], found[self._plain]))
        return Measured(tuple(pairs), rate, _samples(self._guarded), self._num_failures)

    async def _window(self, port: int, count: int, rate: float) -> Timings:
        # One digit is left for it in what makes requests differ.
        self._seed = (self._seed + 1) % 10
        timings = await run_open([port], self._requests, count, rate, seed=self._seed)
        self._num_failures += len(timings.failures)
        for failure in timings.failures[:3]:
            sys.stderr.write(f"failed: {failure}\n")
        if port == self._guarded:
            self._num_guarded += len(timings.whole)
            await self._settle()
        return timings

    async def _settle(self) -> None:
        """Until everything that was sampled has been compared or dropped."""
        sampled = sum(is_sampled(number, self._plan.share) for number in range(1, self._num_guarded + 1))
        give_up = time.monotonic() + _SETTLE_SECONDS
        while sum(_samples(self._guarded).values()) < sampled:
            if time.monotonic() > give_up:
                raise RuntimeError("the guard has not done with its samples in time")
            await asyncio.sleep(0.2)


def _samples(port: int) -> dict[str, int]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/admin/quality") as response:
        found: dict[str, int] = json.load(response)["samples"]
        return found


@contextmanager
def _plain_router(stack: Stack) -> Iterator[int]:
    """One more router before the stack's worker, without the guard."""
    entries = Path(f"/proc/{stack.pid('router')}/environ").read_bytes().decode().rstrip("\0").split("\0")
    variables = dict(entry.split("=", 1) for entry in entries)
    variables.pop(SUPERVISOR_VARIABLE, None)
    port = free_port()
    variables |= {"HYPIC_ROUTER_PORT": str(port), "HYPIC_ROUTER_GUARD_SHARE": "0"}
    with subprocess.Popen([sys.executable, "-m", "services.cli.main", "router"], env=variables) as router:
        try:
            await_ready(port)
            yield port
        finally:
            router.terminate()


async def measure(plan: Plan) -> Measured:
    """Start everything, measure, stop it."""
    variables = {"HYPIC_ROUTER_GUARD_SHARE": str(plan.share)}
    stack = Stack(StackOptions(_CHECKPOINT, port=0, log_level="warning", variables=variables))
    await stack.start()
    try:
        with _plain_router(stack) as plain:
            guarded = int(stack.base_url.rpartition(":")[2])
            return await Bench(guarded, plain, plan, stack.model_name).run()
    finally:
        await stack.stop()


def rows_of(measured: Measured, plan: Plan) -> Iterator[Row]:
    """What is aimed at first."""
    ratios = sorted(pair.guarded / pair.plain for pair in measured.pairs)
    of_what = f"{plan.pairs} pairs of {plan.requests} requests at {100 * plan.load:g} % load, share {plan.share:g}"
    yield Row(
        f"p95 of the first token, guard on over off, median ({of_what})", median(ratios), "×", _REACH, better="lower"
    )
    yield Row("lowest ratio of a pair", ratios[0], "×", better="lower")
    yield Row("highest ratio of a pair", ratios[-1], "×", better="lower")
    yield Row("p95 of the first token, guard on, median", 1000 * median(pair.guarded for pair in measured.pairs), "ms",
              better="lower")  # fmt: skip
    yield Row("p95 of the first token, guard off, median", 1000 * median(pair.plain for pair in measured.pairs), "ms",
              better="lower")  # fmt: skip
    yield Row("arrivals a second", measured.rate, "1/s")
    for outcome, count in measured.samples.items():
        yield Row(f"samples {outcome}", count, "", better="higher" if outcome == "compared" else "lower")
    yield Row("failed requests", measured.num_failures, "", 0.0, better="lower")


def main() -> None:
    """Measure, print, and write where asked to."""
    parser = argparse.ArgumentParser(prog="python -m bench.guard", description=__doc__)
    parser.add_argument("--out", type=Path, help="result file; without it rows are printed only")
    parser.add_argument("--share", type=float, default=0.01, help="of the requests that the guard looks at")
    parser.add_argument("--load", type=float, default=0.7, help="of the rate of requests one at a time")
    parser.add_argument("--pairs", type=int, default=10, help="windows with and without the guard")
    parser.add_argument("--requests", type=int, default=100, help="in a window")
    arguments = parser.parse_args()
    plan = Plan(arguments.share, arguments.load, arguments.pairs, arguments.requests)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = runner.run(measure(plan))
    rows = list(rows_of(measured, plan))
    for row in rows:
        print(f"{row.value:10.4g} {row.unit:5} {row.measure}")
    if arguments.out:
        merge_results(arguments.out, " ".join(["python -m bench.guard", *sys.argv[1:]]), cpu_device(), _SUBJECT, rows)


if __name__ == "__main__":
    main()
