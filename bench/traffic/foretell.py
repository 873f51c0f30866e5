"""`hypic bench traffic foretell`: what the simulator says of levels that were measured, from measured costs alone."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.results import Row, cpu_device, merge_results
from bench.traffic.bodies import Mode
from bench.traffic.levels import lead_seconds, percentile
from bench.traffic.options import told
from bench.traffic.stream import Piece, Removal, TrafficRequest, TrafficStream
from bench.traffic.workload import Workload, WorkloadError, read_workload
from services.cache.domain.eviction import POLICIES
from services.cache.traces import TracePart, TraceRequest
from services.simulator.cluster import Setting, simulate
from services.simulator.costs import SHIPPED, Costs, read_costs, shipped_names
from services.simulator.workload import read_arrivals

__all__ = ["Foretold", "foretell", "foretell_cell", "trace_of"]

# Between the ends of arrivals and the next level's; queues have emptied by then.
_PAUSE_SECONDS = 60.0
_DEFAULT_COSTS = "h200-qwen3.5-35b-a3b"


@dataclass(frozen=True, slots=True)
class Foretold:
    """Seconds to the first token at one rate, of the p50 and the p95: measured, and simulated with workers of the same costs."""

    rate: float
    measured: tuple[float, float]
    simulated: tuple[float, float]


def trace_of(
    events: Sequence[TrafficRequest | Removal], since: float, seen: set[tuple[object, ...]]
) -> Iterator[TraceRequest]:
    """Requests as the simulator reads them, `since` seconds later. Documents are segments. Of what stands ahead of the documents,
    and of earlier turns, only what no earlier request began with is live: the rest is in prefix snapshots. `seen` are those.
    """
    for event in events:
        if isinstance(event, Removal):
            continue
        run: tuple[object, ...] = (event.tenant,)
        live = 0
        *earlier, last = event.turns
        history = [piece for turn in earlier for piece in (*turn.documents, turn.question, turn.reply)]
        for piece in (*event.system, *history):
            run = (hash(run), piece.name, piece.version)
            live += 0 if run in seen else piece.tokens
            seen.add(run)
        segments = tuple(TracePart(_name(piece), piece.tokens) for piece in last.documents)
        yield TraceRequest(since + event.at, event.tenant, (*segments, TracePart("", live + last.question.tokens)))


def foretell_cell(
    cell: dict[str, Any], facts: dict[str, Any], workload: Workload, costs: Costs, num_workers: int = 1
) -> list[Foretold]:
    """One cell of levels.json: the same requests, drawn again, on virtual workers that begin as the real one did."""
    stream, seen = TrafficStream(workload), set[tuple[object, ...]]()
    filled = stream.take(int(facts["fill_requests"]))[: int(cell["filled"])]
    pace = max(float(cell["fill_seconds"]), 1e-3) / max(len(filled), 1)
    trace: list[TraceRequest] = []
    for index, request in enumerate(filled):
        trace += [TraceRequest(index * pace, own.tenant, own.parts) for own in trace_of([request], 0.0, seen)]
    since = float(cell["fill_seconds"]) + _PAUSE_SECONDS
    if settle := float(facts["settle_seconds"]):
        trace += trace_of(stream.draw(float(cell["start_rate"]), settle), since, seen)
        since += settle + _PAUSE_SECONDS
    spans: list[tuple[float, float]] = []
    for level in cell["levels"]:
        trace += trace_of(stream.draw(level["rate"], level["seconds"]), since, seen)
        spans.append((since + lead_seconds(level["seconds"]), since + level["seconds"]))
        since += level["seconds"] + _PAUSE_SECONDS
    room = facts.get("memory_bytes", {}).get("stored")
    setting = Setting(num_workers, policy=POLICIES["gdsf"], room_bytes=room)
    begin = trace[0].time if trace else 0.0
    served = simulate(list(read_arrivals(trace, costs, 1.0)), costs, setting).served
    found = []
    for level, (start, end) in zip(cell["levels"], spans, strict=True):
        times = sorted(own.first_token_seconds for own in served if start <= own.time + begin < end)
        measured = (level["first_token_p50"], level["first_token_p95"])
        if None not in measured and times:
            found.append(Foretold(level["rate"], measured, (percentile(times, 0.5), percentile(times, 0.95))))
    return found


def foretell(
    levels: Annotated[Path, typer.Argument(help="levels.json of `measure` or `h200`.")],
    costs: Annotated[str, typer.Option(help=f"What work takes: a file, or one of {', '.join(shipped_names())}.")] = (
        _DEFAULT_COSTS
    ),
    workload: Annotated[
        list[str] | None, typer.Option("--workload", "-w", help="Files of workloads that do not come along.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Virtual workers.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Result file; without it rows are printed only.")] = None,
) -> None:
    """Set the simulator's first tokens beside those that were measured with `compose`, level by level.

    Levels in which first tokens had no 95th percentile, cut ones, are left out. Replies are not decoded in the simulator.
    """
    with told():
        facts = _read(levels)
        chosen = read_costs(SHIPPED / f"{costs}.toml" if costs in shipped_names() else Path(costs))
        own = {one.name: one for one in map(read_workload, workload or [])}
        for cell in facts["cells"]:
            if cell["mode"] != Mode.COMPOSE:
                continue
            name = cell["workload"]
            drawn = (own.get(name) or read_workload(name)).scaled(float(facts["scale"]))
            rows = list(_rows(foretell_cell(cell, facts, drawn, chosen, workers)))
            for row in rows:
                typer.echo(f"{row.value:10.4g} {row.unit:3} {name}: {row.measure}")
            if out and rows:
                merge_results(
                    out, f"hypic bench traffic foretell --costs {costs}", cpu_device(), f"foretold_{name}", rows
                )


def _rows(found: Sequence[Foretold]) -> Iterator[Row]:
    for own in found:
        for name, place in (("p50", 0), ("p95", 1)):
            ratio = own.simulated[place] / own.measured[place]
            measured = f"{own.measured[place]:.3g} s"
            yield Row(f"simulated over measured TTFT {name} ({measured}) at {own.rate:.3g} a second", ratio, "×")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        cells = content["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"{path}: is no levels.json of `hypic bench traffic measure` ({error!r})") from error
    if not isinstance(cells, list):
        raise WorkloadError(f"{path}: cells must be a list")
    return dict(content)


def _name(piece: Piece) -> str:
    return f"{piece.name}@{piece.version}"
