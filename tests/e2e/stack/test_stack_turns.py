"""The state behind a reply through real services: the next turn begins with it, exactly, or as before where it cannot."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack.asking import Answer, document
from tests.e2e.stack.served import ServedStack, wait_until

_CONFIG = Path(__file__).parents[3] / "models" / "demo" / "tokenizer.json"


def _stop_token() -> str:
    added = {each["content"]: each["id"] for each in json.loads(_CONFIG.read_text())["added_tokens"]}
    return str(added["<|im_end|>"])


class Talk:
    """A conversation that goes on with the replies that came."""

    def __init__(self, stack: ServedStack, name: str, **options: str) -> None:
        self._stack = stack
        self._options = options
        part = {"type": "document", "id": name} | document(name, 80)
        first = [part, {"type": "text", "text": "What opens?"}]
        self.messages: list[Any] = [
            {"role": "system", "content": "Answer from the documents."},
            {"role": "user", "content": first},
        ]

    def ask(self, **more: Any) -> Answer:  # noqa: ANN401 # JSON
        """The reply to the last message, which ends by itself."""
        body = {
            "model": self._stack.model,
            "temperature": 0,
            "max_tokens": 24,
            "min_tokens": 6,
            # As a reply of some words ends.
            "logit_bias": {_stop_token(): 100},
            "messages": self.messages,
            "hypic": {"explain": True} | self._options | more.pop("hypic", {}),
        }
        before = self._ended()
        response = self._stack.http.post("/v1/chat/completions", json=body | more)
        assert response.status_code == 200, response.text
        if body["hypic"].get("reuse") != "off":
            wait_until(lambda: self._ended() > before)
        answer = Answer(response.json())
        answer.check_counts()
        return answer

    def go_on(self, reply: str, question: str = "When?") -> None:
        """Say what the client makes of the reply, and ask on."""
        self.messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]

    def _ended(self) -> float:
        """Replies about whose state something was decided."""
        return self._stack.router_metric("hypic_turns_total")


def kept(stack: ServedStack, end: str = "kept") -> float:
    return stack.router_metric("hypic_turns_total", f'end="{end}"')


def covered_tokens(answer: Answer) -> int:
    """Of the parts that a prefix snapshot has served."""
    return sum(part["tokens"] for part in answer.raw["hypic"]["parts"] if part["served"] == "prefix")


def turn_tokens(answer: Answer) -> int:
    """Of a prompt, its reply, and the line break behind the stop token, which counts with the reply."""
    return answer.prompt_tokens + int(answer.raw["usage"]["completion_tokens"]) + 1


@pytest.fixture(scope="module", autouse=True)
def demo_only(stack: ServedStack) -> None:
    if stack.model != "demo":
        pytest.skip("needs the demo model: a random one's tokens are not those of its text")


@pytest.mark.parametrize("reuse", ["compose", "exact"])
def test_the_next_turn_begins_behind_the_reply(stack: ServedStack, reuse: str) -> None:
    talk = Talk(stack, f"goes on {reuse}", reuse=reuse)
    before = kept(stack)
    for _ in range(2):
        first = talk.ask()
        talk.go_on(first.text)
        second = talk.ask(max_tokens=12)
        assert covered_tokens(second) == turn_tokens(first)
        talk.go_on(second.text, "Where from?")
    assert kept(stack) == before + 4
    warm = talk.ask()
    # The same tokens, computed and composed from nothing.
    fresh = talk.ask(cache_salt="fresh")
    assert covered_tokens(fresh) == 0
    assert warm.text == fresh.text


def test_a_reply_that_the_client_alters_is_computed(stack: ServedStack) -> None:
    """Behind the snapshot at the end of the message before it."""
    talk = Talk(stack, "altered", reuse="exact")
    first = talk.ask()
    talk.go_on(first.text + " So they say.")
    second = talk.ask()
    assert 0 < covered_tokens(second) < first.prompt_tokens


def test_what_was_composed_is_for_compose_alone(stack: ServedStack) -> None:
    talk = Talk(stack, "composed")
    first = talk.ask()
    talk.go_on(first.text)
    exact = talk.ask(hypic={"reuse": "exact"})
    off = talk.ask(hypic={"reuse": "off"})
    assert covered_tokens(exact) < first.prompt_tokens
    assert covered_tokens(off) == 0
    assert exact.text == off.text
    assert covered_tokens(talk.ask()) == turn_tokens(first)


def test_it_falls_with_its_document(stack: ServedStack) -> None:
    talk = Talk(stack, "gone turn")
    first = talk.ask()
    talk.go_on(first.text)
    assert stack.invalidate_document("gone turn") >= 2
    second = talk.ask()
    assert covered_tokens(second) < first.prompt_tokens
    assert second.served == ["cold"]


def test_what_does_not_end_by_itself_leaves_nothing(stack: ServedStack) -> None:
    talk = Talk(stack, "cut")
    for end, more in (("length", {"max_tokens": 4, "min_tokens": 4}), ("stop", {"stop": [" "], "min_tokens": 0})):
        before = kept(stack, end)
        talk.ask(**more | {"logit_bias": {}})
        assert kept(stack, end) == before + 1
