"""`hypic bench traffic neighbours`: what a hot tenant costs the quiet ones beside it, while documents change."""

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from bench.results import Row, merge_results
from bench.traffic.bodies import Mode
from bench.traffic.client import Endpoint, TrafficError
from bench.traffic.connection import Target
from bench.traffic.ideal import optimal_hits
from bench.traffic.levels import KEPT_SHARE, Level, lead_seconds, percentile, summarise
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
from bench.traffic.scrape import COUNTERS, GAUGES, difference, scrape
from bench.traffic.sender import send_open
from bench.traffic.stack import StackPlan
from bench.traffic.stream import TrafficRequest, TrafficStream
from bench.traffic.workload import Workload

__all__ = ["NeighboursPlan", "NeighboursResult", "neighbours", "quiet_times", "rows_of"]

_HOT = "tenant-0"
_PATIENCE_SECONDS = 60.0
_REACH = 1.3


@dataclass(frozen=True, slots=True)
class NeighboursPlan:
    """rate: of all tenants together; the quiet ones' share of it is sent alone first, for as many seconds."""

    rate: float
    seconds: float


@dataclass(frozen=True, slots=True)
class NeighboursResult:
    """alone, beside: seconds to the first token of the quiet tenants' counted requests, rising; level: of all, beside the hot
    one; best: share of the documents' tokens that an offline optimum has with as many as there were entries.
    """

    alone: Sequence[float]
    beside: Sequence[float]
    level: Level
    best: float


def quiet_times(records: Sequence[Record], seconds: float) -> list[float]:
    """Of the quiet tenants' requests behind the lead, rising; infinite where no answer came."""
    counted = [own for own in records if own.tenant != _HOT and own.due >= lead_seconds(seconds)]
    return sorted(
        own.first_token if own.is_answered and own.first_token is not None else float("inf") for own in counted
    )


def rows_of(result: NeighboursResult, plan: NeighboursPlan) -> Iterator[Row]:
    """What is aimed at first."""
    alone, beside = (percentile(times, KEPT_SHARE) for times in (result.alone, result.beside))
    load = f"{plan.rate:g} requests a second of all"
    if 0 < alone < float("inf") and beside < float("inf"):
        yield Row(f"quiet tenants' TTFT p95 beside a hot one over alone, {load}", beside / alone, "×", _REACH, "lower")
        yield Row("quiet tenants' TTFT p95, alone", alone, "s", better="lower")
        yield Row("quiet tenants' TTFT p95, beside", beside, "s", better="lower")
    yield Row("quiet tenants' requests", len(result.beside), "")
    tokens = result.level.tokens
    reusable = tokens["hit"] + tokens["cold"]
    hits = tokens["hit"] / reusable if reusable else 0.0
    yield Row("tokens of documents' bodies that were hits", 100 * hits, "%")
    if result.best:
        yield Row("the same over an offline optimum with as many entries", hits / result.best, "×")
    for name in ("evicted_entries", "invalidated_entries"):
        if name in result.level.metrics:
            yield Row(name.replace("_", " "), result.level.metrics[name], "")


async def run_neighbours(place: Place, filled: CellResult, fill: int, plan: NeighboursPlan) -> NeighboursResult:
    """Quiet ones alone, then all, over the cache as it was filled; both draws are of one stream."""
    cell = filled.cell
    stream = TrafficStream(cell.workload)
    first = [own for own in stream.draw(plan.rate, plan.seconds) if own.tenant != _HOT]
    say(f"{plan.seconds:g} s without the hot tenant …")
    alone = await send_open(place.endpoint, list(plan_events(first, cell, place.wording)), _PATIENCE_SECONDS, _never)
    second = stream.draw(plan.rate, plan.seconds)
    say(f"{plan.seconds:g} s with it, {plan.rate:g} requests a second …")
    before = await asyncio.to_thread(scrape, place.endpoint.metrics)
    beside = await send_open(place.endpoint, list(plan_events(second, cell, place.wording)), _PATIENCE_SECONDS, _never)
    behind = await asyncio.to_thread(scrape, place.endpoint.metrics)
    level = summarise(beside, plan.rate, plan.seconds, (), difference(before, behind, COUNTERS))
    held = int(behind.get(GAUGES["cache_entries"], 0))
    ahead = [*_sent(filled, fill), *(own for own in first if isinstance(own, TrafficRequest))]
    asked = [own for own in second if isinstance(own, TrafficRequest)]
    best = optimal_hits([*ahead, *asked], held, len(ahead)) if held else 0.0
    return NeighboursResult(quiet_times(alone, plan.seconds), quiet_times(beside, plan.seconds), level, best)


def _sent(filled: CellResult, fill: int) -> list[TrafficRequest]:
    """What filled the cache, drawn again."""
    stream = TrafficStream(filled.cell.workload)
    sent = stream.take(fill)[: filled.filled] if fill else []
    for level in filled.levels:
        sent += [own for own in stream.draw(level.rate, level.seconds) if isinstance(own, TrafficRequest)]
    return sent


def _never(state: object, elapsed: float) -> bool:
    return False


def neighbours(  # noqa: PLR0913 # one parameter an option
    workload: Annotated[str, typer.Option("--workload", "-w", help="With several tenants, the first one hot.")] = (
        "neighbours"
    ),
    rate: Annotated[float, typer.Option(min=0.01, help="Requests a second of all tenants.")] = 4.0,
    seconds: Annotated[float, typer.Option(min=1, help="Of each of the two loads.")] = 120.0,
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
    """Send what the quiet tenants ask, alone, and then beside the hot one: their first tokens, hits and evictions.

    Memory below what the documents of all tenants need makes the cache evict.
    """
    plan = NeighboursPlan(rate, seconds)
    with told():
        (own,) = read_workloads([workload], scale)
        if own.tenants.count < 2:
            raise TrafficError(f"--workload: {own.name} has one tenant; take one with [tenants] count of at least 2")
        remote = (
            None if url is None else Endpoint(Target(url), read_callers(key or [], own.tenants.count), metrics or ())
        )
        stack = StackPlan(
            model,
            own.tenants.count,
            device=device,
            state_bytes=read_size("--state-memory", state_memory),
            page_bytes=read_size("--page-memory", page_memory),
            variables=dict(read_pair("--variable", one) for one in variable or []),
        )
        result = asyncio.run(_neighbours(own, plan, fill, (remote, stack)))
    rows = list(rows_of(result, plan))
    for row in rows:
        typer.echo(f"{row.value:10.4g} {row.unit:3} {row.measure}")
    if out:
        command = " ".join(["hypic bench traffic", *sys.argv[1:]])
        merge_results(out, command, device_name(device), own.name, rows)


async def _neighbours(
    workload: Workload, plan: NeighboursPlan, fill: int, place: tuple[Endpoint | None, StackPlan]
) -> NeighboursResult:
    async with open_place(*place) as opened:
        cell = Cell(workload, Mode.COMPOSE, opened.model, "traffic-neighbours")
        filled = CellResult(cell)
        # Without promises one level behind the filling is what there is.
        settings = Settings((), min(10.0, plan.seconds), fill)
        deadline = time.perf_counter() + 10 * plan.seconds
        await measure_cell(opened.endpoint, filled, opened.wording, settings, deadline, say)
        return await run_neighbours(opened, filled, fill, plan)
