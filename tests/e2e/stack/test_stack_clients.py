"""The calls that docs/api.md shows for each client are run as they stand, and answer rightly from the demo model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from tests.e2e.stack.served import ServedStack

PAGE = Path("docs/api.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CLIENTS = ("from openai", "from anthropic", "from langchain_openai")


def test_every_client_has_one() -> None:
    assert [sum(client in code for code in SNIPPETS) for client in CLIENTS] == [1, 1, 1]


@pytest.mark.parametrize("code", SNIPPETS, ids=[code.split()[1].partition(".")[0] for code in SNIPPETS])
def test_the_call_answers(stack: ServedStack, code: str) -> None:
    code = code.replace("http://127.0.0.1:8000", stack.base_url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["1903"]), done.stderr


def test_an_evaluation_against_the_endpoint(stack: ServedStack, tmp_path: Path) -> None:
    """Both ways of serving answer, and documents are composed."""
    text = "Plepi is a port on the northern coast. The town was founded in 1903. It has 8215 inhabitants. " * 3
    row = {"question": "When was Plepi founded?", "documents": [{"title": "Plepi", "text": text}], "answers": ["1903"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(row))
    command = ["eval", "--against", stack.base_url, "--questions", str(tmp_path / "questions.jsonl"), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)["result"]
    assert (result["questions"], result["off_right"]) == (1, 100.0)
    assert result["composed_share"] > 0
