"""`hypic simulate`: a trace on virtual workers."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.cache.domain.eviction import POLICIES, Policy
from services.cache.traces import TraceError, read_trace
from services.cli.sizes import parse_capacity
from services.simulator.cluster import FanOut, Order, Setting, simulate
from services.simulator.costs import SHIPPED, Costs, read_costs, shipped_names
from services.simulator.errors import SimulationError
from services.simulator.report import Report, report
from services.simulator.workload import Arrival, distinct_bytes, read_arrivals

__all__ = ["command"]

_DEFAULT_COSTS = "h200-qwen3.5-35b-a3b"
_MOST_WORKERS = 1024
# Narrower terminals wrap lines; a table with cut columns says nothing.
_TABLE_WIDTH = 124


class Pipelining(StrEnum):
    """Whether states travel layer by layer, or when they are whole."""

    ON = "on"
    OFF = "off"


def command(  # noqa: PLR0913 # one parameter an option
    trace: Annotated[
        Path, typer.Argument(help="A trace (docs/operations.md), a Mooncake trace, or RAGPulse's folder.")
    ],
    costs: Annotated[
        str, typer.Option(help=f"What work takes: a file, or one of {', '.join(shipped_names())}.")
    ] = _DEFAULT_COSTS,
    cost: Annotated[
        list[str] | None, typer.Option(help="One number of that file, as capture.pass_tokens=8192; several times.")
    ] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas between them.")] = "1,2,4,8,16,32,64",
    order: Annotated[
        list[Order] | None, typer.Option(help="How cold segments are assigned; several times. Default: longest-first.")
    ] = None,
    pipelining: Annotated[
        list[Pipelining] | None,
        typer.Option(help="States travel layer by layer, or when they are whole; several times. Default: on."),
    ] = None,
    fan_out: Annotated[
        FanOut, typer.Option(help="A request captures on its share of the workers while others wait, or on all.")
    ] = FanOut.SHARED,
    room: Annotated[
        str | None,
        typer.Option(help="Of each worker's states, as 64GiB, or 10% of the bytes of all; default: no bound."),
    ] = None,
    policy: Annotated[str, typer.Option(help=f"What leaves a full room: {', '.join(POLICIES)}.")] = "gdsf",
    speed: Annotated[float, typer.Option(help="The trace's requests so many times as fast.")] = 1.0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write all figures as one JSON object; - prints it in place of the table."),
    ] = None,
) -> None:
    """Replay a trace on virtual workers with measured costs, and the router's own scheduling.

    Says when first tokens come and how busy workers are. Replies are not decoded, and nothing fails.
    """
    try:
        chosen = read_costs(_costs_path(costs), cost or [])
        arrivals = list(read_arrivals(read_trace(trace), chosen, speed))
        base = Setting(1, fan_out=fan_out, policy=_policy(policy), room_bytes=_room(room, arrivals))
        varied = itertools.product(_numbers(workers), order or [Order.LONGEST_FIRST], pipelining or [Pipelining.ON])
    except (SimulationError, TraceError) as error:
        typer.echo(f"hypic simulate: {error}", err=True)
        raise typer.Exit(2) from error
    settings = [
        replace(base, num_workers=number, order=own, is_pipelined=streams is Pipelining.ON)
        for number, own, streams in varied
    ]
    reports = _simulate_all(arrivals, chosen, settings)
    content = {
        "trace": str(trace),
        "requests": len(arrivals),
        "costs": asdict(chosen),
        "runs": list(map(asdict, reports)),
    }
    if json_file is not None:
        _write(json_file, json.dumps(content, indent=2, ensure_ascii=False))
    if str(json_file) != "-":
        console = Console()
        console = Console(width=max(console.width, _TABLE_WIDTH))
        console.print(
            _table(reports, f"{trace.name}: {len(arrivals)} requests; {chosen.name}; seconds to first tokens")
        )


def _costs_path(text: str) -> Path:
    shipped = SHIPPED / f"{text}.toml"
    return shipped if text in shipped_names() else Path(text)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError as error:
        raise SimulationError(f"--workers: {text!r} is no list of numbers; write 1,2,4") from error
    if not all(1 <= number <= _MOST_WORKERS for number in numbers):
        raise SimulationError(f"--workers: {text!r}; each must be from 1 to {_MOST_WORKERS}")
    return numbers


def _policy(name: str) -> Policy:
    if name not in POLICIES:
        raise SimulationError(f"--policy: {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name]


def _room(text: str | None, arrivals: Sequence[Arrival]) -> int | None:
    if text is None:
        return None
    try:
        return parse_capacity(text, distinct_bytes(arrivals))
    except ValueError as error:
        raise SimulationError(f"--room: {text!r} is no size; give one as 64GiB, 800MiB or 10%") from error


def _simulate_all(arrivals: Sequence[Arrival], costs: Costs, settings: Sequence[Setting]) -> list[Report]:
    """One run after the other, with a bar on the terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        reports = []
        for setting in settings:
            name = f"{setting.num_workers} workers, {setting.order}"
            task = progress.add_task(name, total=len(arrivals))
            run = simulate(arrivals, costs, setting, partial(_show, progress, task))
            progress.remove_task(task)
            reports.append(report(run, setting))
        return reports


def _show(progress: Progress, task: TaskID, number: int) -> None:
    progress.update(task, completed=number)


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        typer.echo(text)
        return
    try:
        path.write_text(text + "\n")
    except OSError as error:
        typer.echo(f"hypic simulate: --json: {path}: {error.strerror or error}", err=True)
        raise typer.Exit(2) from error


def _table(reports: Sequence[Report], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    names = ("workers", "order", "states", "makespan", "mean", "p50", "p90", "p99", "busy", "hits")
    for name in (*names, "fairness", "slowest"):
        table.add_column(name, justify="left" if name in ("order", "states") else "right", no_wrap=True)
    for one in reports:
        times = [one.makespan_seconds, one.mean_seconds, one.p50_seconds, one.p90_seconds, one.p99_seconds]
        table.add_row(
            str(one.workers),
            one.order,
            "by layer" if one.pipelining else "whole",
            *(f"{time:.3g}" for time in times),
            f"{one.utilisation:.1%}",
            f"{one.hit_ratio:.1%}",
            f"{one.fairness:.3f}",
            f"{one.max_slowdown:.1f}×",
        )
    return table
