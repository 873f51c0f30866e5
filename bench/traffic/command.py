"""`hypic bench traffic`: open-loop load against a running stack, or against one of its own."""

import asyncio
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.traffic.answers import answers
from bench.traffic.bodies import Mode
from bench.traffic.client import Endpoint
from bench.traffic.connection import Target
from bench.traffic.foretell import foretell
from bench.traffic.ideal import figures_of
from bench.traffic.measure import Cell, CellResult, Say, Settings, measure_cell
from bench.traffic.neighbours import neighbours
from bench.traffic.options import (
    DEMO,
    OUT,
    Device,
    Fill,
    Keys,
    LevelSeconds,
    Metrics,
    Modes,
    Out,
    PageMemory,
    Promises,
    Scale,
    Seconds,
    StateMemory,
    Url,
    Variables,
    WorkloadNames,
    device_name,
    read_callers,
    read_pair,
    read_size,
    read_workloads,
    say,
    told,
)
from bench.traffic.overload import overload
from bench.traffic.place import Place, open_place
from bench.traffic.plot import draw_levels
from bench.traffic.report import Origin, table_of, write_files
from bench.traffic.stack import StackPlan
from bench.traffic.stream import TrafficStream
from bench.traffic.workload import Workload

__all__ = ["app"]

app = typer.Typer(
    help="Open-loop load from seeded workloads: which rate of requests keeps a promise on the first token.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_SHAPE = Path("tests/data/configs/Qwen3.5-35B-A3B")
# Of a card that holds the model alone; the line is long enough for all of a level.
_CARD_VARIABLES = {
    "HYPIC_WORKER_CONTEXT_LENGTH": "40960",
    "HYPIC_WORKER_PAGE_TOKENS": "64",
    "HYPIC_WORKER_MAX_RUNNING": "32",
    "HYPIC_WORKER_MAX_WAITING": "256",
}
_PROMISES = (0.3, 1.0, 3.0)
Counted = Annotated[int, typer.Option(min=1, help="Requests that are looked at.")]


app.command()(answers)
app.command()(overload)
app.command()(neighbours)
app.command()(foretell)


@app.callback()
def traffic() -> None:
    """Open-loop load from seeded workloads: which rate of requests keeps a promise on the first token."""


@app.command()
def describe(workload: WorkloadNames = None, scale: Scale = 1.0, requests: Counted = 2000) -> None:
    """What requests of a workload are like, counted out, and what caches without bounds would reuse. Needs no server."""
    with told():
        workloads = read_workloads(workload, scale)
    for own in workloads:
        figures = figures_of(TrafficStream(own).take(requests))
        typer.echo(f"{own.name}: {own.title}")
        for name, value in asdict(figures).items():
            shown = ", ".join(f"{key} {share:.3f}" for key, share in value.items()) if isinstance(value, dict) else None
            typer.echo(
                f"  {name.replace('_', ' '):22} {shown or (f'{value:.4g}' if isinstance(value, float) else value)}"
            )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to measure, in `seconds` from the start of the stack on."""

    workloads: list[Workload]
    modes: list[Mode]
    settings: Settings
    seconds: float
    out: Path
    device: str
    scale: float

    @property
    def origin(self) -> Origin:
        """The command and the device."""
        return " ".join(["hypic bench traffic", *sys.argv[1:]]), self.device


@app.command()
def measure(  # noqa: PLR0913 # one parameter an option
    workload: WorkloadNames = None,
    mode: Modes = None,
    promise: Promises = None,
    seconds: Seconds = 600.0,
    level_seconds: LevelSeconds = 20.0,
    fill: Fill = 400,
    scale: Scale = 1.0,
    out: Out = OUT,
    url: Url = None,
    key: Keys = None,
    metrics: Metrics = None,
    model: Annotated[
        Path, typer.Option(help="Of the own stack: a checkpoint, or a folder with config.json alone (random weights).")
    ] = DEMO,
    device: Device = "cpu",
    state_memory: StateMemory = "1GiB",
    page_memory: PageMemory = "512MiB",
    host_memory: Annotated[str, typer.Option(help="Of a tier below, in host memory.")] = "0",
    variable: Variables = None,
) -> None:
    """Find the highest rate that keeps each promise (95 % of first tokens in time), by mode, at equal memory.

    Every mode and workload begins with an empty cache: what was stored for the tenants before is dropped. Status 2: an option,
    a workload or the stack cannot be used; what was measured until then is written.
    """
    with told():
        workloads = read_workloads(workload, scale)
        tenants = max(own.tenants.count for own in workloads)
        settings = Settings(tuple(sorted(promise or _PROMISES)), level_seconds, fill)
        remote = None if url is None else Endpoint(Target(url), read_callers(key or [], tenants), metrics or ())
        stack = StackPlan(
            model,
            tenants,
            device=device,
            state_bytes=read_size("--state-memory", state_memory),
            page_bytes=read_size("--page-memory", page_memory),
            host_bytes=read_size("--host-memory", host_memory),
            variables=dict(read_pair("--variable", own) for own in variable or []),
        )
        asyncio.run(
            _measure(
                _Plan(workloads, mode or list(Mode), settings, seconds, out, device_name(device), scale), remote, stack
            )
        )


@app.command()
def h200(  # noqa: PLR0913 # one parameter an option
    workload: WorkloadNames = None,
    mode: Modes = None,
    promise: Promises = None,
    seconds: Seconds = 480.0,
    level_seconds: LevelSeconds = 8.0,
    fill: Fill = 300,
    scale: Scale = 1.0,
    out: Out = OUT,
    config: Annotated[
        Path, typer.Option(help="Folder of the config.json whose shape is served, with random weights.")
    ] = _SHAPE,
    device: Device = "cuda",
    state_memory: StateMemory = "38GiB",
    page_memory: PageMemory = "22GiB",
    variable: Variables = None,
) -> None:
    """The same for one card: a whole stack here, without Redis, with random weights in a large model's shape.

    Workloads without `--workload`: multi_document and rag_trace. Replies mean nothing, times do.
    """
    with told():
        names = workload or ["multi_document", "rag_trace"]
        workloads = read_workloads(names, scale)
        settings = Settings(
            tuple(sorted(promise or _PROMISES)),
            level_seconds,
            fill,
            fill_concurrency=16,
            settle_seconds=level_seconds / 2,
        )
        own = dict(read_pair("--variable", one) for one in variable or [])
        tenants = max(one.tenants.count for one in workloads)
        states, pages = read_size("--state-memory", state_memory), read_size("--page-memory", page_memory)
        stack = StackPlan(config, tenants, 1, device, states, 0, pages, _CARD_VARIABLES | own)
        asyncio.run(
            _measure(
                _Plan(workloads, mode or list(Mode), settings, seconds, out, device_name(device), scale), None, stack
            )
        )


async def _measure(plan: _Plan, remote: Endpoint | None, stack: StackPlan) -> None:
    deadline = time.perf_counter() + plan.seconds
    results: list[CellResult] = []
    facts: dict[str, Any] = asdict(plan.settings) | {"scale": plan.scale}
    if remote is None:
        memory = {"states": stack.state_bytes, "pages": stack.page_bytes, "host": stack.host_bytes}
        facts |= {"memory_bytes": memory | {"stored": stack.budget_bytes}, "variables": dict(stack.variables)}

    def keep(line: str) -> None:
        say(line)
        write_files(plan.out, plan.origin, results, facts)

    async with open_place(remote, stack) as place:
        try:
            await _measure_all(plan, deadline, place, results, keep)
        finally:
            # Ahead of the stack's own end, which takes time.
            write_files(plan.out, plan.origin, results, facts)
            Console(width=132).print(table_of(results))
            draw_levels(results, plan.out / "traffic.png")


async def _measure_all(plan: _Plan, deadline: float, place: Place, results: list[CellResult], keep: Say) -> None:
    """Every cell has an equal part of the time that is left."""
    cells = [(own, mode) for own in plan.workloads for mode in plan.modes]
    for number, (workload, mode) in enumerate(cells):
        now = time.perf_counter()
        share = (deadline - now) / (len(cells) - number)
        if share < plan.settings.level_seconds:
            say(f"{workload.name}, {mode}: no time is left")
            continue
        say(f"{workload.name}, {mode}: {share:.0f} s")
        result = CellResult(Cell(workload, mode, place.model, f"traffic-{number}-{workload.name}-{mode}"))
        results.append(result)
        await measure_cell(place.endpoint, result, place.wording, plan.settings, now + share, keep)
