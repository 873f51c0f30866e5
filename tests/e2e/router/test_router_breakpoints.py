"""Breakpoints of clients mark where prefix snapshots may stand; they make no segment and change no token."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.router_stack import RouterStack
from tests.stub_worker import MODEL_NAME

LONG = "The river city has a long history of trade, bridges and floods. "
MARKS = [{"cache_control": {"type": "ephemeral"}}, {"prompt_cache_breakpoint": {"mode": "explicit"}}]


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    with RouterStack() as stack:
        yield stack


def ask(stack: RouterStack, mark: dict[str, Any], question: str, salt: str, **more: object) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": LONG} | mark, {"type": "text", "text": question}]
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        "hypic": {"explain": True},
        "cache_salt": salt,
    }
    response = stack.http.post("/v1/chat/completions", json=body | more)
    assert response.status_code == 200, response.text
    assert "x-hypic-ignored-fields" not in response.headers
    parts: list[dict[str, Any]] = response.json()["hypic"]["parts"]
    return parts


@pytest.mark.parametrize("mark", MARKS, ids=["anthropic", "openai"])
def test_what_stands_ahead_of_a_breakpoint_is_reused_exactly(stack: RouterStack, mark: dict[str, Any]) -> None:
    salt = str(mark)
    first = ask(stack, mark, "One?", salt)
    second = ask(stack, mark, "Two?", salt, prompt_cache_key="mine", cache_control={"type": "ephemeral"})
    assert [part["kind"] for part in first] == ["prefix", "prefix", "live"]
    assert [part["served"] for part in first] == ["live", "live", "live"]
    assert [part["served"] for part in second] == ["prefix", "live", "live"]
    ids = [[i for part in request.parts for i in part.token_ids] for request in stack.worker.requests[-2:]]
    ask(stack, {}, "Two?", salt)
    assert [i for part in stack.worker.requests[-1].parts for i in part.token_ids] == ids[1]


def test_without_one_nothing_of_a_message_is(stack: RouterStack) -> None:
    ask(stack, {}, "One?", "none")
    assert [part["served"] for part in ask(stack, {}, "Two?", "none")] == ["live", "live"]


def test_documents_behind_a_breakpoint_are_reused_in_exact_mode(stack: RouterStack) -> None:
    document = {"type": "document", "text": LONG * 2, **MARKS[0]}

    def served(question: str, reuse: str) -> list[tuple[str, str]]:
        content = [document, {"type": "text", "text": question}]
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": content}],
            "hypic": {"explain": True, "reuse": reuse},
            "cache_salt": "document",
        }
        parts = stack.http.post("/v1/chat/completions", json=body).json()["hypic"]["parts"]
        return [(part["kind"], part["served"]) for part in parts]

    assert served("One?", "exact")[1] == ("segment", "live")
    assert served("Two?", "exact")[1] == ("segment", "prefix")
