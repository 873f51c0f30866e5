"""The simulator is asked for the same requests that were measured."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.traffic.command import app
from bench.traffic.foretell import foretell_cell, trace_of
from bench.traffic.stream import Piece, TrafficRequest, TrafficStream, Turn
from bench.traffic.workload import read_workload
from services.simulator.costs import SHIPPED, read_costs

COSTS = read_costs(SHIPPED / "cpu-demo.toml")


def _level(rate: float, first: float | None) -> dict[str, Any]:
    return {"rate": rate, "seconds": 40.0, "first_token_p50": first, "first_token_p95": first}


def test_what_was_said_before_is_not_live_again() -> None:
    first = Turn((Piece("d", 300),), Piece("q", 10), Piece("r", 7))
    again = Turn((), Piece("p", 12), Piece("s", 7))
    system = (Piece("system", 50),)
    events = [TrafficRequest(0.0, "t", system, (first,)), TrafficRequest(2.0, "t", system, (first, again))]
    trace = list(trace_of(events, 5.0, set()))
    assert [own.time for own in trace] == [5.0, 7.0]
    assert [(part.id, part.num_tokens) for part in trace[0].parts] == [("d@0", 300), ("", 60)]
    # The system prompt is known; the first turn has not been a history yet.
    assert [(part.id, part.num_tokens) for part in trace[1].parts] == [("", 300 + 10 + 7 + 12)]
    seen: set[tuple[object, ...]] = set()
    assert [sum(part.num_tokens for part in own.parts) for own in trace_of([events[1], events[1]], 0.0, seen)] == [
        379,
        12,
    ]


def test_levels_are_foretold_from_costs_alone() -> None:
    workload = read_workload("multi_document").scaled(0.05)
    facts = {"fill_requests": 40, "settle_seconds": 0.0, "scale": 0.05}
    cell = {"filled": 30, "fill_seconds": 60.0, "start_rate": 0.5, "levels": [_level(0.05, 0.4), _level(1.0, 2.0)]}
    quiet, busy = foretell_cell(cell, facts, workload, COSTS)
    assert (quiet.rate, quiet.measured) == (0.05, (0.4, 0.4))
    # One request alone takes what the costs say of its parts, all of them there or none.
    (request,) = TrafficStream(workload).take(1)
    tokens = [own.tokens for own in request.turns[-1].documents]
    least = COSTS.combine_seconds(len(tokens), sum(map(COSTS.state.seam, tokens)))
    most = least + sum(map(COSTS.capture_seconds, tokens))
    assert 0.3 * least < quiet.simulated[0] < 2 * most
    assert busy.simulated[1] > quiet.simulated[1]
    assert foretell_cell(cell, facts, workload, COSTS, num_workers=8)[1].simulated[1] < busy.simulated[1]
    cut = cell | {"levels": [_level(0.05, None)]}
    assert foretell_cell(cut, facts, workload, COSTS) == []


def test_a_file_of_something_else_is_told(tmp_path: Path) -> None:
    path = tmp_path / "levels.json"
    path.write_text("[]")
    result = CliRunner().invoke(app, ["foretell", str(path)])
    assert result.exit_code == 2
    assert "is no levels.json" in result.output


@pytest.mark.parametrize("command", ["measure", "h200", "answers", "overload", "neighbours", "describe", "foretell"])
def test_every_command_explains_its_options(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--help" in result.output
