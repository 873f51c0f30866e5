"""`hypic bench traffic`: open-loop load against a running stack, or against one of its own."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.results import cpu_device
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
_OUT = Path("traffic")
_DEMO = Path("models/demo")
_SHAPE = Path("tests/data/configs/Qwen3.5-35B-A3B")
# Of a card that holds the model alone. A step of decoding waits for some layers of a sweep of 2,048 tokens, not for one alone;
# the line is long enough for all of a level.
_CARD_VARIABLES = {
    "HYPIC_WORKER_CONTEXT_LENGTH": "40960",
    "HYPIC_WORKER_PAGE_TOKENS": "64",
    "HYPIC_WORKER_MAX_RUNNING": "32",
    "HYPIC_WORKER_MAX_WAITING": "256",
    "HYPIC_WORKER_LAYER_TOKENS": "20480",
}
_PROMISES = (0.3, 1.0, 3.0)

WorkloadNames = Annotated[
    list[str] | None,
    typer.Option("--workload", "-w", help=f"A TOML file, or one of {', '.join(shipped_names())}; several times."),
]
Modes = Annotated[list[Mode] | None, typer.Option("--mode", help="Several times; default: all, one after the other.")]
Promises = Annotated[
    list[float] | None,
    typer.Option("--promise", min=0.001, help="Seconds to the first token; several times. [0.3 1 3]"),
]
Seconds = Annotated[float, typer.Option(min=5, help="For everything; what is known then is written.")]
LevelSeconds = Annotated[float, typer.Option(min=1, help="Of arrivals at one rate.")]
Fill = Annotated[int, typer.Option(min=0, help="Requests that fill the cache first.")]
Scale = Annotated[float, typer.Option(min=0.001, max=100, help="All lengths of the workloads times this.")]
Out = Annotated[Path, typer.Option(help="Folder of traffic.json, levels.json, requests.jsonl, traffic.png.")]
Variables = Annotated[
    list[str] | None, typer.Option("--variable", help="HYPIC_…=VALUE of the own stack; several times.")
]


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
    """What to measure, in `seconds` from the start of the stack on."""

    workloads: list[Workload]
    modes: list[Mode]
    settings: Settings
    seconds: float
    out: Path
    device: str

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
    out: Out = _OUT,
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
    variable: Variables = None,
) -> None:
    """Find the highest rate that keeps each promise (95 % of first tokens in time), by mode, at equal memory.

    Every mode and workload begins with an empty cache: what was stored for the tenants before is dropped. Status 2: an option,
    a workload or the stack cannot be used; what was measured until then is written.
    """
    with _told():
        workloads = _read(workload, scale)
        tenants = max(own.tenants.count for own in workloads)
        settings = Settings(tuple(sorted(promise or _PROMISES)), level_seconds, fill)
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
        asyncio.run(
            _measure(_Plan(workloads, mode or list(Mode), settings, seconds, out, _device_name(device)), remote, stack)
        )


@app.command()
def h200(  # noqa: PLR0913 # one parameter an option
    workload: WorkloadNames = None,
    mode: Modes = None,
    promise: Promises = None,
    seconds: Seconds = 480.0,
    level_seconds: LevelSeconds = 12.0,
    fill: Fill = 300,
    scale: Scale = 1.0,
    out: Out = _OUT,
    config: Annotated[
        Path, typer.Option(help="Folder of the config.json whose shape is served, with random weights.")
    ] = _SHAPE,
    device: Annotated[str, typer.Option(help="Of the worker: cuda, or cpu to try this with a small shape.")] = "cuda",
    state_memory: Annotated[str, typer.Option(help="Of stored states.")] = "38GiB",
    page_memory: Annotated[str, typer.Option(help="Of keys and values, stored and running.")] = "22GiB",
    variable: Variables = None,
) -> None:
    """The same for one card: a whole stack here, without Redis, with random weights in a large model's shape.

    Workloads without `--workload`: multi_document and rag_trace. Replies mean nothing, times do.
    """
    with _told():
        names = workload or ["multi_document", "rag_trace"]
        workloads = _read(names, scale)
        settings = Settings(
            tuple(sorted(promise or _PROMISES)),
            level_seconds,
            fill,
            fill_concurrency=16,
            settle_seconds=level_seconds / 2,
        )
        own = dict(_pair("--variable", one) for one in variable or [])
        tenants = max(one.tenants.count for one in workloads)
        states, pages = _size("--state-memory", state_memory), _size("--page-memory", page_memory)
        stack = StackPlan(config, tenants, 1, device, states, 0, pages, _CARD_VARIABLES | own)
        asyncio.run(
            _measure(_Plan(workloads, mode or list(Mode), settings, seconds, out, _device_name(device)), None, stack)
        )


@contextmanager
def _told() -> Iterator[None]:
    """What cannot be used is told in a line."""
    try:
        yield
    except (WorkloadError, WordingError, TrafficError, StackStartError, ValueError) as error:
        typer.echo(f"hypic bench traffic: {error}", err=True)
        raise typer.Exit(2) from error


async def _measure(plan: _Plan, remote: Endpoint | None, stack: StackPlan) -> None:
    deadline = time.perf_counter() + plan.seconds
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
            await _measure_all(plan, deadline, _Place(endpoint, name, Wording(words, 1)), results, keep)
        finally:
            # Ahead of the stack's own end, which takes time.
            write_files(plan.out, plan.origin, results, facts)
            Console(width=132).print(table_of(results))
            draw_levels(results, plan.out / "traffic.png")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where requests go, and how they are written."""

    endpoint: Endpoint
    model: str
    wording: Wording


async def _measure_all(plan: _Plan, deadline: float, place: _Place, results: list[CellResult], keep: Say) -> None:
    """Every cell has an equal part of the time that is left."""
    cells = [(own, mode) for own in plan.workloads for mode in plan.modes]
    for number, (workload, mode) in enumerate(cells):
        now = time.perf_counter()
        share = (deadline - now) / (len(cells) - number)
        if share < plan.settings.level_seconds:
            _say(f"{workload.name}, {mode}: no time is left")
            continue
        _say(f"{workload.name}, {mode}: {share:.0f} s")
        result = CellResult(Cell(workload, mode, place.model, f"traffic-{number}-{workload.name}-{mode}"))
        results.append(result)
        await measure_cell(place.endpoint, result, place.wording, plan.settings, now + share, keep)


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
    """Of the first card, without taking any of its memory."""
    if device == "cpu":
        return cpu_device()
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return device
