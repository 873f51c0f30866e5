"""`hypic simulate` as it is called."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.main import app

REQUESTS = (
    {"time": 0, "parts": [{"id": "a", "tokens": 4096}, {"id": "b", "tokens": 2048}, {"tokens": 60}]},
    {"time": 0.1, "parts": [{"id": "c", "tokens": 3000}, {"id": "d", "tokens": 3000}, {"tokens": 60}]},
    {"time": 5, "parts": [{"id": "a", "tokens": 4096}, {"id": "c", "tokens": 3000}, {"tokens": 60}]},
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(request)}\n" for request in REQUESTS))
    return path


def test_it_prints_a_table_and_writes_all_figures(trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    options = ["--workers", "1,2", "--order", "longest-first", "--order", "round-robin", "--pipelining", "off"]
    result = CliRunner().invoke(app, ["simulate", str(trace), *options, "--json", str(target)])
    assert result.exit_code == 0, result.output
    assert "trace.jsonl: 3 requests" in result.stdout
    assert result.stdout.count("round-robin") == 2
    assert "…" not in result.stdout
    content = json.loads(target.read_text())
    assert content["requests"] == 3
    assert content["costs"]["capture"]["pass_tokens"] == 4096
    runs = content["runs"]
    assert [(run["workers"], run["order"], run["pipelining"]) for run in runs] == [
        (1, "longest-first", False),
        (1, "round-robin", False),
        (2, "longest-first", False),
        (2, "round-robin", False),
    ]
    assert all(run["requests"] == 3 and run["hit_tokens"] == 7096 and run["captures"] == 4 for run in runs)
    assert runs[2]["mean_seconds"] < runs[0]["mean_seconds"]


def test_a_dash_prints_json_alone_and_options_reach_the_run(trace: Path) -> None:
    def run(*options: str) -> dict[str, float]:
        result = CliRunner().invoke(app, ["simulate", str(trace), "--workers", "2", *options, "--json", "-"])
        assert result.exit_code == 0, result.output
        (found,) = json.loads(result.stdout)["runs"]
        return dict(found)

    plain = run()
    assert run() == plain
    assert run("--speed", "10")["makespan_seconds"] < 1 < plain["makespan_seconds"]
    assert run("--cost", "combine.pass_seconds=0.5")["mean_seconds"] > plain["mean_seconds"] + 0.1
    assert run("--costs", "cpu-demo")["mean_seconds"] > plain["mean_seconds"]
    assert run("--room", "1MiB")["evictions"] > 0 == plain["evictions"]
    assert run("--fan-out", "all")["requests"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "1,two"], "--workers: '1,two' is no list of numbers"),
        (["--workers", "0"], "--workers: '0'; each must be from 1 to 1024"),
        (["--costs", "a100"], "a100: No such file"),
        (["--cost", "speed=3"], "--cost 'speed=3': the file has no number"),
        (["--policy", "magic"], "--policy: 'magic' is none of lru, lfu, gdsf"),
        (["--speed", "nan"], "--speed: nan must be a positive number"),
        (["--speed", "0"], "--speed: 0.0 must be a positive number"),
        (["--room", "much"], "--room: 'much' is no size"),
        (["--json", "/nowhere/figures.json"], "--json: /nowhere/figures.json: No such file"),
    ],
)
def test_a_faulty_option_is_named(trace: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["simulate", str(trace), *options])
    assert result.exit_code == 2
    assert f"hypic simulate: {message}" in result.stderr


def test_a_faulty_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 1}\n')
    result = CliRunner().invoke(app, ["simulate", str(path)])
    assert result.exit_code == 2
    assert "trace.jsonl:1:" in result.stderr
