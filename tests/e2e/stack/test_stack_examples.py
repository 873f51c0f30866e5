"""The calls that README and `hypic up` show are run as they stand, and answer rightly from the demo model."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from services.cli.examples import client_examples
from tests.e2e.stack.served import ServedStack

README = Path("README.md")
ANSWER = "1903"


def run_python(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def shown(stack: ServedStack) -> str:
    return client_examples(stack.base_url, stack.model, "")


def test_the_curl_call_answers_and_is_reused(stack: ServedStack) -> None:
    call = shown(stack).partition("  curl -s")[2].partition("  from openai")[0]
    command = ["bash", "-c", f"curl -s{call}"]
    replies = [
        json.loads(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout) for _ in range(2)
    ]
    assert [reply["choices"][0]["message"]["content"].strip() for reply in replies] == [ANSWER] * 2
    assert replies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_openai_call_answers(stack: ServedStack) -> None:
    code = textwrap.dedent("  from openai" + shown(stack).partition("  from openai")[2].partition("Stop with")[0])
    answer, cached = run_python(code)
    assert answer == ANSWER
    assert int(cached) >= 0


def test_the_call_of_the_readme_answers_and_is_reused(stack: ServedStack) -> None:
    block = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    code = block[1].replace("http://127.0.0.1:8000", stack.base_url)
    run_python(code)
    assert run_python(code) == [ANSWER, "32"]
