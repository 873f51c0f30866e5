"""Requests to a served stack, and what their replies say."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import httpx2

__all__ = ["CHAT", "Answer", "Asked", "StreamedReply", "ask", "body", "document", "read_stream", "stream"]

CHAT = "/v1/chat/completions"
_WORDS = (
    "the of river city museum king opens closes nine ten people large small water trade island north south year "
    "stone bridge harbour winter ship road old new first last before after under council market tower"
).split()


class Asked(Protocol):
    """What requests are sent to."""

    model: str
    base_url: str
    http: httpx2.Client


def document(name: str, num_words: int = 60) -> dict[str, str]:
    """A document of its own for every name; the same one for the same name."""
    source = random.Random(name)
    return {"title": f"About {name}", "text": " ".join(source.choice(_WORDS) for _ in range(num_words))}


def body(stack: Asked, documents: list[Any], question: str = "What opens?", **more: Any) -> dict[str, Any]:  # noqa: ANN401 # JSON
    """A greedy request with an explanation; `more` replaces or adds fields, those of `hypic` by their own names."""
    options = {"explain": True} | {name: more.pop(name) for name in ("reuse", "cold") if name in more}
    messages = [{"role": "system", "content": "Answer from the documents."}, {"role": "user", "content": question}]
    base = {"model": stack.model, "temperature": 0, "max_tokens": 12, "documents": documents, "messages": messages}
    return base | {"hypic": options} | more


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole reply."""

    raw: dict[str, Any]

    @property
    def text(self) -> str:
        """What the model said."""
        return str(self.raw["choices"][0]["message"]["content"])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed for the request."""
        return int(self.raw["usage"]["prompt_tokens_details"]["cached_tokens"])

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length."""
        return int(self.raw["usage"]["prompt_tokens"])

    @property
    def segments(self) -> list[dict[str, Any]]:
        """Explanations of the documents, in prompt order."""
        return [part for part in self.raw["hypic"]["parts"] if part["kind"] == "segment"]

    @property
    def served(self) -> list[str]:
        """How each document was served."""
        return [part["served"] for part in self.segments]

    def check_counts(self) -> None:
        """Tokens of the parts add up to the prompt, and reused ones to what usage says."""
        parts = self.raw["hypic"]["parts"]
        assert sum(part["tokens"] for part in parts) == self.prompt_tokens
        assert sum(part["reused_tokens"] for part in parts) == self.cached_tokens
        for part in parts:
            assert part["tokens"] == part["live_tokens"] + part["captured_tokens"] + part["reused_tokens"]


def ask(stack: Asked, documents: list[Any], question: str = "What opens?", **more: Any) -> Answer:  # noqa: ANN401 # JSON
    """Send a request that has to succeed; its counts are checked."""
    response = stack.http.post(CHAT, json=body(stack, documents, question, **more))
    assert response.status_code == 200, response.text
    answer = Answer(response.json())
    answer.check_counts()
    return answer


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """The rest of a stream. `error` is the code of an error event; `is_ended` when `[DONE]` came."""

    text: str
    finish_reason: str | None
    error: str | None
    is_ended: bool


def read_stream(lines: Iterator[str], until_texts: int = 0) -> StreamedReply:
    """Read a stream to its end, or until it has brought this many pieces of text."""
    texts: list[str] = []
    finish_reason, error = None, None
    for line in filter(None, lines):
        if line == "data: [DONE]":
            return StreamedReply("".join(texts), finish_reason, error, True)
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            assert set(event["error"]) == {"message", "type", "param", "code"}
            error = event["error"]["code"]
        for choice in event.get("choices", []):
            finish_reason = choice["finish_reason"] or finish_reason
            if choice["delta"].get("content"):
                texts.append(choice["delta"]["content"])
        if until_texts and len(texts) >= until_texts:
            break
    return StreamedReply("".join(texts), finish_reason, error, False)


def stream(stack: Asked, request: dict[str, Any]) -> Any:  # noqa: ANN401 # httpx2's own context manager
    """Open a stream; use it as a context."""
    return httpx2.stream("POST", stack.base_url + CHAT, json=request | {"stream": True}, timeout=60)
