"""`hypic replay`: what eviction policies would have served of a trace."""

import itertools
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from services.cache.domain.eviction import POLICIES
from services.cache.domain.values import Limits
from services.cache.replay import Costs, ReplayResult, distinct_bytes, replay
from services.cache.traces import TraceError, read_trace
from services.cli.sizes import parse_capacity

__all__ = ["command"]

_COST_NAMES = tuple(field.name for field in fields(Costs))
# Narrower terminals wrap lines; a table with cut columns says nothing.
_TABLE_WIDTH = 96
_SHARES = ["2%", "5%", "10%", "20%", "50%"]


@dataclass(frozen=True, slots=True)
class _Line:
    """One replay."""

    capacity: str
    capacity_bytes: int
    policy: str
    min_uses: int
    result: ReplayResult

    def as_json(self) -> dict[str, object]:
        """Sums and ratios."""
        return {
            "capacity": self.capacity,
            "capacity_bytes": self.capacity_bytes,
            "policy": self.policy,
            "min_uses": self.min_uses,
            "hit_ratio_requests": self.result.request_ratio,
            "hit_ratio_tokens": self.result.token_ratio,
            "hit_ratio_bytes": self.result.byte_ratio,
            **asdict(self.result),
        }


def command(
    trace: Annotated[
        Path, typer.Argument(help="A trace (docs/operations.md), a Mooncake trace, or RAGPulse's folder.")
    ],
    capacity: Annotated[
        list[str] | None, typer.Option(help="As 64GiB, or 10% of the bytes of all states; several times.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(POLICIES)}; several times.")] = None,
    min_uses: Annotated[list[int] | None, typer.Option(min=1, help="HYPIC_CACHE_MIN_USES; several times.")] = None,
    cost: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(_COST_NAMES)}, as name=number; several times.")
    ] = None,
    share_seconds: Annotated[float, typer.Option(min=0, help="HYPIC_CACHE_SHARE_SECONDS.")] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Replay a trace through eviction policies: hit ratios and seconds saved at each capacity."""
    try:
        costs, chosen = _costs(cost or []), _policies(policy or list(POLICIES))
        requests = read_trace(trace)
        all_bytes = distinct_bytes(requests, costs)
        budgets = {text: _capacity(text, all_bytes) for text in capacity or _SHARES}
        lines = []
        for (text, budget), name, least in itertools.product(budgets.items(), chosen, min_uses or [1]):
            limits = Limits(budget, share_seconds=share_seconds, min_uses=least)
            lines.append(_Line(text, budget, name, least, replay(requests, POLICIES[name], limits, costs)))
    except TraceError as error:
        typer.echo(f"hypic replay: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        content = {"trace": str(trace), "requests": len(requests), "distinct_bytes": all_bytes, "costs": asdict(costs)}
        typer.echo(json.dumps(content | {"replays": [line.as_json() for line in lines]}, indent=2))
    else:
        console = Console()
        console = Console(width=max(console.width, _TABLE_WIDTH))
        console.print(_table(lines, f"{trace.name}: {len(requests)} requests, {all_bytes / 2**30:.4g} GiB of states"))


def _costs(changes: list[str]) -> Costs:
    found: dict[str, float] = {}
    for change in changes:
        name, _, number = change.partition("=")
        try:
            found[name] = float(number)
        except ValueError as error:
            raise TraceError(f"--cost: {change!r} is not name=number") from error
        if name not in _COST_NAMES or not (math.isfinite(found[name]) and found[name] >= 0):
            raise TraceError(f"--cost: {change!r}; names are {', '.join(_COST_NAMES)}, numbers 0 or more")
    whole = {name: int(value) if name.endswith("_bytes") else value for name, value in found.items()}
    return replace(Costs(), **whole)  # type: ignore[arg-type] # fields of bytes got whole numbers


def _policies(names: list[str]) -> list[str]:
    if unknown := set(names) - set(POLICIES):
        raise TraceError(f"--policy: {', '.join(sorted(unknown))} is none of {', '.join(POLICIES)}")
    return names


def _capacity(text: str, all_bytes: int) -> int:
    try:
        return parse_capacity(text, all_bytes)
    except ValueError as error:
        raise TraceError(f"--capacity: {text!r} is no size; give one as 64GiB, 800MiB or 10%") from error


def _table(lines: list[_Line], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("capacity", "policy", "min uses", "requests", "tokens", "bytes", "saved s", "captures", "evictions"):
        table.add_column(name, justify="left" if name in ("capacity", "policy") else "right", no_wrap=True)
    for line in lines:
        result = line.result
        ratios = [f"{ratio:.1%}" for ratio in (result.request_ratio, result.token_ratio, result.byte_ratio)]
        sums = [f"{result.saved_seconds:.1f}", str(result.captures), str(result.evictions)]
        table.add_row(line.capacity, line.policy, str(line.min_uses), *ratios, *sums)
    return table
