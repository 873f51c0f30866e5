"""Options that the commands share, and how they are read."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from bench.results import cpu_device
from bench.traffic.bodies import Mode
from bench.traffic.client import Caller, TrafficError
from bench.traffic.wording import WordingError
from bench.traffic.workload import Workload, WorkloadError, read_workload, shipped_names
from services.cli.sizes import parse_capacity
from services.cli.supervisor import StackStartError
from services.simulator.errors import SimulationError

OUT = Path("traffic")
DEMO = Path("models/demo")

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
Url = Annotated[str | None, typer.Option("--url", help="A running stack; without it one is started here.")]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", help="TENANT=KEY, with the scopes generate and documents, for a workload's tenants in turn."),
]
Metrics = Annotated[list[str] | None, typer.Option("--metrics", help="Metrics page of a service; several times.")]
Device = Annotated[str, typer.Option(help="Of the own stack's worker: cpu or cuda.")]
StateMemory = Annotated[str, typer.Option(help="Of the own worker's stored states.")]
PageMemory = Annotated[str, typer.Option(help="Of the own worker's keys and values, stored and running.")]
Variables = Annotated[
    list[str] | None, typer.Option("--variable", help="HYPIC_…=VALUE of the own stack; several times.")
]

__all__ = [
    "DEMO",
    "OUT",
    "Device",
    "Fill",
    "Keys",
    "LevelSeconds",
    "Metrics",
    "Modes",
    "Out",
    "PageMemory",
    "Promises",
    "Scale",
    "Seconds",
    "StateMemory",
    "Url",
    "Variables",
    "WorkloadNames",
    "device_name",
    "read_callers",
    "read_pair",
    "read_size",
    "read_workloads",
    "say",
    "told",
]


@contextmanager
def told() -> Iterator[None]:
    """What cannot be used is told in a line."""
    try:
        yield
    except (WorkloadError, WordingError, TrafficError, StackStartError, SimulationError, ValueError) as error:
        typer.echo(f"hypic bench traffic: {error}", err=True)
        raise typer.Exit(2) from error


def say(line: str) -> None:
    """Progress, apart from results."""
    print(line, file=sys.stderr, flush=True)


def read_workloads(names: list[str] | None, scale: float) -> list[Workload]:
    """Of scaled ones, the name says so."""
    found = [read_workload(name) for name in names or shipped_names()]
    return found if scale == 1 else [own.scaled(scale) for own in found]


def read_callers(pairs: list[str], tenants: int) -> dict[str, Caller]:
    """For `tenant-0` and so on, in the order in which keys are given."""
    given = [Caller(*read_pair("--key", own)) for own in pairs]
    if given and len(given) < tenants:
        raise TrafficError(f"--key: {len(given)} keys for {tenants} tenants of a workload; give one for each")
    if tenants > 1 and not given:
        raise TrafficError(f"--key: a workload has {tenants} tenants; give a key for each")
    return {f"tenant-{index}": own for index, own in enumerate(given)}


def read_pair(option: str, text: str) -> tuple[str, str]:
    """Of `NAME=VALUE`.

    Raises:
        TrafficError: it is none.
    """
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise TrafficError(f"{option}: {text!r} must be NAME=VALUE")
    return name, value


def read_size(option: str, text: str) -> int:
    """Bytes; 0 is allowed.

    Raises:
        TrafficError: it is no size.
    """
    try:
        return 0 if text == "0" else parse_capacity(text, 0)
    except ValueError as error:
        raise TrafficError(f"{option}: {text!r} is no size; give one as 64GiB or 800MiB") from error


def device_name(device: str) -> str:
    """Of the first card, without taking any of its memory."""
    if device == "cpu":
        return cpu_device()
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return device
