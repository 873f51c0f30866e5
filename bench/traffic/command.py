"""`hypic bench traffic`: open-loop load against a running stack, or against one of its own."""

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.traffic.bodies import Mode
from bench.traffic.client import Caller, Endpoint, TrafficError, find_model, learn_server_words
from bench.traffic.connection import Target
from bench.traffic.ideal import figures_of
from bench.traffic.measure import Cell, CellResult, Say, Settings, measure_cell
from bench.traffic.plot import draw_levels
from bench.traffic.report import Origin, table_of, write_files
from bench.traffic.stack import StackPlan, serve_stack
from bench.traffic.stream import TrafficStream
from bench.traffic.wording import Wording, WordingError
from bench.traffic.workload import Workload, WorkloadError, read_workload, shipped_names
from services.cli.sizes import parse_capacity
from services.cli.supervisor import StackStartError

__all__ = ["app"]

app = typer.Typer(
    help="Open-loop load from seeded workloads: which rate of requests keeps a promise on the first token.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_DEMO = Path("models/demo")
_PROMISES = (0.3, 1.0, 3.0)

WorkloadNames = Annotated[
    list[str] | None,
    typer.Option("--workload", "-w", help=f"A TOML file, or one of {', '.join(shipped_names())}; several times."),
]
Scale = Annotated[float, typer.Option(min=0.001, max=100, help="All lengths of the workloads times this.")]


@app.callback()
def traffic() -> None:
    """Open-loop load from seeded workloads: which rate of requests keeps a promise on the first token."""


@app.command()
def describe(workload: WorkloadNames = None, scale: Scale = 1.0, requests: int = 2000) -> None:
    """What requests of a workload are like, counted out, and what caches without bounds would reuse. Needs no server."""
    for own in _read(workload, scale):
        figures = figures_of(TrafficStream(own).take(requests))
        typer.echo(f"{own.name}: {own.title}")
        for name, value in asdict(figures).items():
            shown = ", ".join(f"{key} {share:.3f}" for key, share in value.items()) if isinstance(value, dict) else None
            typer.echo(
                f"  {name.replace('_', ' '):22} {shown or (f'{value:.4g}' if isinstance(value, float) else value)}"
            )


@dataclass(frozen=True, slots=True)
class _Plan:
    """deadline: of `time.perf_counter`."""

    workloads: list[Workload]
    modes: list[Mode]
    settings: Settings
    deadline: float
    out: Path
    origin: Origin


@app.command()
def measure(  # noqa: PLR0913 # one parameter an option
    workload: WorkloadNames = None,
    mode: Annotated[list[Mode] | None, typer.Option(help="Several times; default: all, one after the other.")] = None,
    promise: Annotated[
        list[float] | None, typer.Option(min=0.001, help="Seconds to the first token; several times. [0.3 1 3]")
    ] = None,
    seconds: Annotated[float, typer.Option(min=5, help="For everything; what is known then is written.")] = 600.0,
    level_seconds: Annotated[float, typer.Option(min=1, help="Of arrivals at one rate.")] = 20.0,
    fill: Annotated[int, typer.Option(min=0, help="Requests that fill the cache first.")] = 400,
    scale: Scale = 1.0,
    out: Annotated[Path, typer.Option(help="Folder of traffic.json, levels.json, requests.jsonl, traffic.png.")] = Path(
        "traffic"
    ),
    url: Annotated[str | None, typer.Option(help="A running stack; without it one is started here.")] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="TENANT=KEY, with the scopes generate and documents, for a workload's tenants in turn."),
    ] = None,
    metrics: Annotated[list[str] | None, typer.Option(help="Metrics page of a service; several times.")] = None,
    model: Annotated[
        Path, typer.Option(help="Of the own stack: a checkpoint, or a folder with config.json alone (random weights).")
    ] = _DEMO,
    device: Annotated[str, typer.Option(help="Of the own stack's worker: cpu or cuda.")] = "cpu",
    state_memory: Annotated[str, typer.Option(help="Of the own worker's stored states.")] = "1GiB",
    page_memory: Annotated[str, typer.Option(help="Of the own worker's keys and values.")] = "512MiB",
    host_memory: Annotated[str, typer.Option(help="Of a tier below, in host memory.")] = "0",
    variable: Annotated[list[str] | None, typer.Option(help="HYPIC_…=VALUE of the own stack; several times.")] = None,
) -> None:
    """Find the highest rate that keeps each promise (95 % of first tokens in time), by mode, at equal memory.

    Every mode and workload begins with an empty cache: what was stored for the tenants before is dropped. Status 2: an option,
    a workload or the stack cannot be used; what was measured until then is written.
    """
    began = time.perf_counter()
    try:
        workloads = _read(workload, scale)
        plan = _Plan(
            workloads,
            mode or list(Mode),
            Settings(tuple(sorted(promise or _PROMISES)), level_seconds, fill),
            began + seconds,
            out,
            (" ".join(["hypic bench traffic", *sys.argv[1:]]), _device_name(device)),
        )
        tenants = max(own.tenants.count for own in workloads)
        remote = None if url is None else Endpoint(Target(url), _callers(key or [], tenants), metrics or ())
        stack = StackPlan(
            model,
            tenants,
            device=device,
            state_bytes=_size("--state-memory", state_memory),
            page_bytes=_size("--page-memory", page_memory),
            host_bytes=_size("--host-memory", host_memory),
            variables=dict(_pair("--variable", own) for own in variable or []),
        )
        asyncio.run(_measure(plan, remote, stack))
    except (WorkloadError, WordingError, TrafficError, StackStartError, ValueError) as error:
        typer.echo(f"hypic bench traffic: {error}", err=True)
        raise typer.Exit(2) from error


async def _measure(plan: _Plan, remote: Endpoint | None, stack: StackPlan) -> None:
    results: list[CellResult] = []
    facts = {"promises": plan.settings.promises, "level_seconds": plan.settings.level_seconds}
    if remote is None:
        facts |= {"memory_bytes": {"states": stack.state_bytes, "pages": stack.page_bytes, "host": stack.host_bytes}}
        facts |= {"variables": dict(stack.variables)}

    def keep(line: str) -> None:
        _say(line)
        write_files(plan.out, plan.origin, results, facts)

    async with AsyncExitStack() as exits:
        endpoint = remote
        if endpoint is None:
            endpoint = await exits.enter_async_context(serve_stack(stack))
        name, context = await asyncio.to_thread(find_model, endpoint)
        words = await asyncio.to_thread(learn_server_words, endpoint, name)
        _say(f"{endpoint.target.url}: {name}, context {context}; {len(words)} words of one token")
        try:
            await _measure_all(plan, endpoint, name, Wording(words, 1), results, keep)
        finally:
            # Ahead of the stack's own end, which takes time.
            write_files(plan.out, plan.origin, results, facts)
            Console(width=132).print(table_of(results))
            draw_levels(results, plan.out / "traffic.png")


async def _measure_all(
    plan: _Plan, endpoint: Endpoint, model: str, wording: Wording, results: list[CellResult], keep: Say
) -> None:
    """Every cell has an equal part of the time that is left."""
    cells = [(own, mode) for own in plan.workloads for mode in plan.modes]
    for number, (workload, mode) in enumerate(cells):
        now = time.perf_counter()
        share = (plan.deadline - now) / (len(cells) - number)
        if share < plan.settings.level_seconds:
            _say(f"{workload.name}, {mode}: no time is left")
            continue
        _say(f"{workload.name}, {mode}: {share:.0f} s")
        result = CellResult(Cell(workload, mode, model, f"traffic-{number}-{workload.name}-{mode}"))
        results.append(result)
        await measure_cell(endpoint, result, wording, plan.settings, now + share, keep)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _read(names: list[str] | None, scale: float) -> list[Workload]:
    """Of scaled ones, the name says so."""
    found = [read_workload(name) for name in names or shipped_names()]
    return found if scale == 1 else [own.scaled(scale) for own in found]


def _callers(pairs: list[str], tenants: int) -> dict[str, Caller]:
    """For `tenant-0` and so on, in the order in which keys are given."""
    given = [Caller(*_pair("--key", own)) for own in pairs]
    if given and len(given) < tenants:
        raise TrafficError(f"--key: {len(given)} keys for {tenants} tenants of a workload; give one for each")
    if tenants > 1 and not given:
        raise TrafficError(f"--key: a workload has {tenants} tenants; give a key for each")
    return {f"tenant-{index}": own for index, own in enumerate(given)}


def _pair(option: str, text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise TrafficError(f"{option}: {text!r} must be NAME=VALUE")
    return name, value


def _size(option: str, text: str) -> int:
    try:
        return 0 if text == "0" else parse_capacity(text, 0)
    except ValueError as error:
        raise TrafficError(f"{option}: {text!r} is no size; give one as 64GiB or 800MiB") from error


def _device_name(device: str) -> str:
    from bench.results import cpu_device

    if device == "cpu":
        return cpu_device()
    import torch

    return str(torch.cuda.get_device_name(0))
