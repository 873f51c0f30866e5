"""A conversation over documents: its history is reused, is what computing it again gives, and falls with its documents."""

from typing import Any

import pytest

from tests.e2e.stack.asking import Answer, document
from tests.e2e.stack.served import ServedStack

REPLY = {"role": "assistant", "content": "It opens at nine, from the north."}


class Conversation:
    """Turns over one document that stands where it was first put."""

    def __init__(self, stack: ServedStack, name: str) -> None:
        self._stack = stack
        part = {"type": "document", "id": name} | document(name, 80)
        self._first = {"role": "user", "content": [part, {"type": "text", "text": "What opens?"}]}

    def ask(self, questions: list[str], **more: Any) -> Answer:  # noqa: ANN401 # JSON
        messages: list[Any] = [{"role": "system", "content": "Answer from the documents."}, self._first]
        for question in questions:
            messages += [REPLY, {"role": "user", "content": question}]
        options = {"explain": True} | more.pop("hypic", {})
        body = {"model": self._stack.model, "temperature": 0, "max_tokens": 8, "messages": messages, "hypic": options}
        response = self._stack.http.post("/v1/chat/completions", json=body | more)
        assert response.status_code == 200, response.text
        answer = Answer(response.json())
        answer.check_counts()
        return answer


def covered(answer: Answer) -> list[str]:
    """How parts were served, up to the last that a snapshot covers."""
    served = [part["served"] for part in answer.raw["hypic"]["parts"]]
    return served[: len(served) - served[::-1].index("prefix")] if "prefix" in served else []


@pytest.fixture(scope="module")
def talk(stack: ServedStack) -> Conversation:
    return Conversation(stack, "conversation")


def test_a_later_turn_reuses_the_turns_before_it(talk: Conversation) -> None:
    assert talk.ask([]).served == ["cold"]
    second = talk.ask(["When?"])
    assert second.served == ["hit"]
    third = talk.ask(["When?", "Where from?"])
    history = covered(third)
    assert set(history) == {"prefix"}
    assert third.served == ["prefix"]
    assert third.cached_tokens > second.cached_tokens
    # The same tokens, computed and composed from nothing.
    fresh = talk.ask(["When?", "Where from?"], cache_salt="fresh")
    assert fresh.served == ["cold"]
    assert third.text == fresh.text
    assert third.prompt_tokens == fresh.prompt_tokens


def test_what_holds_a_composed_part_is_for_compose_alone(talk: Conversation) -> None:
    exact = talk.ask(["When?", "Where from?"], hypic={"reuse": "exact"})
    assert "segment" not in [part["kind"] for part in exact.raw["hypic"]["parts"] if part["served"] == "prefix"]
    off = talk.ask(["When?", "Where from?"], hypic={"reuse": "off"})
    again = talk.ask(["When?", "Where from?"], hypic={"reuse": "exact"})
    assert again.served == ["prefix"]
    assert again.text == off.text == exact.text


def test_the_history_falls_with_its_document(stack: ServedStack) -> None:
    talk = Conversation(stack, "falling")
    for questions in ([], ["When?"], ["When?", "Why?"]):
        last = talk.ask(questions)
    assert last.served == ["prefix"]
    assert stack.invalidate_document("falling") > 1
    after = talk.ask(["When?", "Why?"])
    assert after.served == ["cold"]
    assert after.text == last.text
