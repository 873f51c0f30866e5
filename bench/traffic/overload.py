"""`hypic bench traffic overload`: more requests than a stack can serve, and what becomes of those that it takes."""

import asyncio
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bench.results import Row, merge_results
from bench.traffic.bodies import Mode
from bench.traffic.client import Endpoint
from bench.traffic.connection import Target
from bench.traffic.levels import KEPT_SHARE, percentile
from bench.traffic.measure import Cell, CellResult, Settings, measure_cell, plan_events
from bench.traffic.options import (
    DEMO,
    Device,
    Fill,
    Keys,
    Metrics,
    PageMemory,
    Scale,
    StateMemory,
    Url,
    Variables,
    device_name,
    read_callers,
    read_pair,
    read_size,
    read_workloads,
    say,
    told,
)
from bench.traffic.place import Place, open_place
from bench.traffic.record import Record
from bench.traffic.sender import Planned, send_open
from bench.traffic.stack import StackPlan
from bench.traffic.stream import TrafficStream
from bench.traffic.workload import Workload

__all__ = ["OverloadPlan", "OverloadResult", "overload", "rows_of", "summarise_overload"]

_PATIENCE_SECONDS = 60.0
# Behind the overload, in shares of the sustained rate and in seconds.
_QUIET_SHARE, _QUIET_SECONDS = 0.5, 20.0
_REACH_PROMISE, _REACH_RECOVERY_SECONDS = 1.5, 10.0


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """rate: that is sustained; over `seconds` `factor` times as many come, then half of it."""

    promise: float
    rate: float
    factor: float
    seconds: float


@dataclass(frozen=True, slots=True)
class OverloadResult:
    """Of the overload: first tokens of what was taken, and until when the rest was told to come back, in seconds.

    recovery_seconds: behind the overload's end, until requests that came from then on all kept the promise; infinite where
    the last ones still did not.
    """

    taken: int
    refused: int
    failed: int
    taken_p95: float
    refusal_p95: float
    recovery_seconds: float


async def run_overload(place: Place, cell: Cell, plan: OverloadPlan) -> OverloadResult:
    """The load and its end, in one go; the cache is as it was left."""
    stream = TrafficStream(cell.workload)
    loud = list(plan_events(stream.draw(plan.factor * plan.rate, plan.seconds), cell, place.wording))
    quiet = plan_events(stream.draw(_QUIET_SHARE * plan.rate, _QUIET_SECONDS), cell, place.wording)
    later = [Planned(plan.seconds + own.due, own.tenant, own.body, own.method, own.path) for own in quiet]
    records = await send_open(place.endpoint, [*loud, *later], _PATIENCE_SECONDS, lambda state, elapsed: False)
    return summarise_overload(records, plan)


def summarise_overload(records: Sequence[Record], plan: OverloadPlan) -> OverloadResult:
    """By when requests were due."""
    loud = [own for own in records if own.due < plan.seconds]
    taken = sorted(own.first_token for own in loud if own.is_answered and own.first_token is not None)
    refused = [own for own in loud if own.is_refused]
    refusals = sorted(own.end for own in refused if own.end is not None)
    late = [own.due - plan.seconds for own in records if own.due >= plan.seconds and _breaks(own, plan.promise)]
    last = max((own.due - plan.seconds for own in records), default=0.0)
    recovery = max(late, default=0.0)
    return OverloadResult(
        taken=len(taken),
        refused=len(refused),
        failed=len(loud) - len(taken) - len(refused),
        taken_p95=percentile(taken, KEPT_SHARE),
        refusal_p95=percentile(refusals, KEPT_SHARE),
        recovery_seconds=math.inf if late and recovery >= last else recovery,
    )


def _breaks(record: Record, promise: float) -> bool:
    return not record.is_answered or record.first_token is None or record.first_token > promise


def rows_of(result: OverloadResult, plan: OverloadPlan) -> Iterator[Row]:
    """What is aimed at first."""
    load = f"{plan.factor:g} × {plan.rate:.3g} requests a second for {plan.seconds:g} s"
    yield Row(
        f"TTFT p95 of taken requests over the promise of {plan.promise:g} s, {load}",
        result.taken_p95 / plan.promise,
        "×",
        _REACH_PROMISE,
        "lower",
    )
    yield Row("until a refusal, p95", 1e3 * result.refusal_p95, "ms", better="lower")
    if math.isfinite(result.recovery_seconds):
        yield Row("until all keep the promise again", result.recovery_seconds, "s", _REACH_RECOVERY_SECONDS, "lower")
    else:
        yield Row(f"still late {_QUIET_SECONDS:g} s behind the overload", 1.0, "", 0.0, "lower")
    yield Row("taken", result.taken, "")
    yield Row("refused with 429", result.refused, "")
    yield Row("failed otherwise", result.failed, "", 0.0, "lower")


def overload(  # noqa: PLR0913 # one parameter an option
    workload: Annotated[str, typer.Option("--workload", "-w", help="A TOML file, or a shipped one's name.")] = (
        "multi_document"
    ),
    promise: Annotated[float, typer.Option(min=0.001, help="Seconds to the first token.")] = 1.0,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Requests a second that keep it; searched for where it is not given.")
    ] = None,
    factor: Annotated[float, typer.Option(min=1, help="So many times that rate.")] = 2.0,
    overload_seconds: Annotated[float, typer.Option(min=1, help="How long.")] = 300.0,
    search_seconds: Annotated[float, typer.Option(min=5, help="For filling the cache and finding the rate.")] = 240.0,
    fill: Fill = 400,
    scale: Scale = 1.0,
    url: Url = None,
    key: Keys = None,
    metrics: Metrics = None,
    model: Annotated[Path, typer.Option(help="Of the own stack, see `measure`.")] = DEMO,
    device: Device = "cpu",
    state_memory: StateMemory = "1GiB",
    page_memory: PageMemory = "512MiB",
    variable: Variables = None,
    out: Annotated[Path | None, typer.Option(help="Result file; without it rows are printed only.")] = None,
) -> None:
    """Send a multiple of the rate that a stack sustains: what it takes keeps its promise, the rest is refused at once.

    The own stack sheds what would wait longer than the promise (`HYPIC_ROUTER_MAX_QUEUE_SECONDS`).
    """
    with told():
        (own,) = read_workloads([workload], scale)
        remote = (
            None if url is None else Endpoint(Target(url), read_callers(key or [], own.tenants.count), metrics or ())
        )
        shedding = {"HYPIC_ROUTER_MAX_QUEUE_SECONDS": f"{promise:g}"}
        stack = StackPlan(
            model,
            own.tenants.count,
            device=device,
            state_bytes=read_size("--state-memory", state_memory),
            page_bytes=read_size("--page-memory", page_memory),
            variables=shedding | dict(read_pair("--variable", one) for one in variable or []),
        )
        wanted = OverloadPlan(promise, rate or 0.0, factor, overload_seconds)
        # With a rate, one level behind the filling is enough to warm up.
        settings = Settings(() if rate else (promise,), min(20.0, search_seconds / 6), fill)
        plan, result = asyncio.run(_overload(own, wanted, settings, search_seconds, (remote, stack)))
    rows = list(rows_of(result, plan))
    for row in rows:
        typer.echo(f"{row.value:10.4g} {row.unit:3} {row.measure}")
    if out:
        command = " ".join(["hypic bench traffic", *sys.argv[1:]])
        merge_results(out, command, device_name(device), f"overload_{own.name}", rows)


async def _overload(
    workload: Workload,
    plan: OverloadPlan,
    settings: Settings,
    search_seconds: float,
    place: tuple[Endpoint | None, StackPlan],
) -> tuple[OverloadPlan, OverloadResult]:
    """With the rate that was found, where none was given."""
    async with open_place(*place) as opened:
        cell = Cell(workload, Mode.COMPOSE, opened.model, "traffic-overload")
        found = CellResult(cell)
        deadline = time.perf_counter() + search_seconds
        await measure_cell(opened.endpoint, found, opened.wording, settings, deadline, say)
        rate = plan.rate or max((own.held for own in found.brackets), default=0.0)
        if not rate:
            raise ValueError(f"no rate kept a promise of {plan.promise:g} s in {search_seconds:g} s; give a looser one")
        plan = OverloadPlan(plan.promise, rate, plan.factor, plan.seconds)
        say(f"{plan.factor:g} × {rate:.3f} requests a second for {plan.seconds:g} s …")
        return plan, await run_overload(opened, cell, plan)
