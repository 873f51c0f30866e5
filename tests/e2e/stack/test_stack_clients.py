"""The calls that docs/api.md shows for each client are run as they stand, and answer rightly from the demo model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
