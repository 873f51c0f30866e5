"""`hypic eval --against` and an endpoint that fails."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypic.v1 import worker_pb2
from typer.testing import CliRunner, Result

from services.cli.main import app
from tests.router_stack import RouterStack, free_port, wait_until

TEXT = "The river city has a long history of trade and bridges. " * 4


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    with RouterStack() as stack:
        yield stack


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [
        {"id": str(n), "question": f"What is {n}?", "documents": [f"{n}. {TEXT}"], "answers": ["42"]} for n in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def report(stack: RouterStack, questions: Path, *options: object) -> tuple[int, dict[str, Any]]:
    result = run("--against", stack.url, "--questions", questions, "--json", "--contains", *options)
    return result.exit_code, json.loads(result.stdout)


def test_pairs_of_replies(stack: RouterStack, questions: Path) -> None:
    status, content = report(stack, questions)
    assert (status, content["model"], content["failures"]) == (0, "stub-model", [])
    assert (content["result"]["questions"], content["result"]["changed"], content["result"]["loss"]) == (3, 0, 0.0)
    assert content["result"]["composed_share"] > 0
    reused = [
        any(part.serving == worker_pb2.PART_SERVING_SEGMENT for part in own.parts) for own in stack.worker.requests[-6:]
    ]
    assert sorted(reused) == [False] * 3 + [True] * 3


def test_a_failing_reply_is_told_and_the_others_count(stack: RouterStack, questions: Path) -> None:
    rows = questions.read_text() + "\n" + json.dumps({"question": "Long?", "documents": ["word " * 9000], "id": "long"})
    questions.write_text(rows)
    status, content = report(stack, questions)
    assert (status, content["result"]["questions"]) == (3, 3)
    assert [own["id"] for own in content["failures"]] == ["long"]
    assert content["failures"][0]["reason"].startswith("400: ")


def test_nothing_answered_is_a_fault(stack: RouterStack, questions: Path) -> None:
    questions.write_text(json.dumps({"question": "Long?", "documents": ["word " * 9000]}))
    result = run("--against", stack.url, "--questions", questions)
    assert result.exit_code == 2
    assert "no question was answered; question 0: 400: " in result.stderr


def test_a_loss_bound_sets_the_status(stack: RouterStack, questions: Path) -> None:
    assert report(stack, questions, "--max-loss", -1)[0] == 1
    assert report(stack, questions, "--max-loss", 0)[0] == 0


def test_nobody_there(questions: Path) -> None:
    result = run("--against", f"http://127.0.0.1:{free_port()}", "--questions", questions)
    assert result.exit_code == 2
    assert "no answer" in result.stderr


def test_another_model(stack: RouterStack, questions: Path) -> None:
    result = run("--against", stack.url, "--questions", questions, "--model", "other")
    assert result.exit_code == 2
    assert "--model other: it is not served; there is stub-model" in result.stderr


def test_an_interrupted_run_keeps_what_is_answered(stack: RouterStack, questions: Path) -> None:
    rows = [{"question": f"What is {n}?", "documents": [TEXT]} for n in range(400)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    before = len(stack.worker.requests)
    command = ["-m", "services.cli.main", "eval", "--against", stack.url, "--questions", str(questions), "--json"]
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: len(stack.worker.requests) >= before + 20, 60)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    content = json.loads(output)
    assert (process.returncode, content["interrupted"], content["failures"]) == (130, True, [])
    assert 1 <= content["result"]["questions"] < 400
