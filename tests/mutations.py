"""Valid requests of every endpoint, and what becomes of them when anything in them is changed."""

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

__all__ = ["RawRequest", "draw_mutated", "valid_requests"]

_ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 17, 2**31, 2**63, 2**64, -(2**64), 0.5, -0.5, 1e-300, 1e308, "", " ", "x", "\x00", "\ud800",
    "é" * 300, "<|im_end|>", "<tool_call>", "compose", "off", [], [None], [[]], [1, 2], ["x"], [{}], {}, {"": ""}, {"text": "x"},
    {"type": "document", "text": "y"}, {"role": "user", "content": "z"}, [{"role": "assistant", "content": "z"}],
]  # fmt: skip
_NAMES = ["extra", "text", "content", "id", "n", "logprobs", "tools", "stream", "system", "cache_control"]
_TEXT = "The tower opens at nine. The old king sold the bridge to the council before the first winter of the war."


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as bytes."""

    method: str
    path: str
    content: bytes


def valid_requests(source: random.Random, model: str) -> list[tuple[str, dict[str, Any]]]:
    """One body for every endpoint that takes one."""
    shared = {
        "model": model,
        "temperature": 0,
        "max_tokens": 2,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 1,
        "stop": ["x"],
        "stream": source.random() < 0.3,
        "cache_salt": "mutations",
        "hypic": {"reuse": "compose", "cold": "parallel", "explain": True},
    }
    documents = [
        {"title": "t", "text": f"{source.randint(0, 5)}: {_TEXT}"},
        {"id": "a", "text": "The tower."},
        "plain text",
    ]
    content = [{"type": "text", "text": "What opens?"}, {"type": "document", "title": "t", "text": "A king opens."}]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    return [
        ("/v1/chat/completions", shared | {"messages": messages, "documents": documents}),
        ("/v1/messages", _anthropic(shared, content)),
        ("/v1/messages/count_tokens", {"model": model, "messages": [{"role": "user", "content": content}]}),
        ("/v1/completions", shared | {"prompt": "The tower opens"}),
        ("/v1/documents", {"id": f"mutated-{source.randint(0, 9)}", "title": "t", "text": _TEXT, "tags": ["odd"]}),
        ("/v1/invalidate", {"tag": "odd"}),
        ("/v1/pins", {"document": "mutated-1"}),
    ]


def _anthropic(shared: dict[str, Any], content: list[dict[str, Any]]) -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": _TEXT}
    marked = {
        "type": "document",
        "title": "t",
        "context": "c",
        "source": source,
        "cache_control": {"type": "ephemeral"},
    }
    kept = {name: value for name, value in shared.items() if name not in ("seed", "stop")}
    return kept | {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [marked, *content]}],
        "stop_sequences": ["x"],
    }


def draw_mutated(source: random.Random, model: str) -> RawRequest:
    """One of the valid requests with one to three changes anywhere in it, or a cut or broken byte of its JSON."""
    requests = valid_requests(source, model)
    # Most of what can go wrong is in prompts.
    path, request = source.choices(requests, [4 if "max_tokens" in body else 1 for _, body in requests])[0]
    return RawRequest("POST", path, _mutate(source, request))


def _mutate(source: random.Random, request: dict[str, Any]) -> bytes:
    for _ in range(source.randint(1, 3)):
        change: Callable[[random.Random, Any, Any], None] = source.choice([_replace, _remove, _repeat])
        places = list(_places(request))
        if places:
            change(source, *source.choice(places))
    content = json.dumps(request).encode()
    if source.random() < 0.1:
        return content[: source.randrange(len(content))]
    if source.random() < 0.1:
        at = source.randrange(len(content))
        return content[:at] + bytes([source.randrange(256)]) + content[at + 1 :]
    return content


def _places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 # JSON
    """Every container in a request with each of its keys or indices."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _replace(source: random.Random, container: Any, key: Any) -> None:  # noqa: ANN401 # JSON
    container[key] = deepcopy(source.choice(_ODD_VALUES))


def _remove(_source: random.Random, container: Any, key: Any) -> None:  # noqa: ANN401 # JSON
    del container[key]


def _repeat(source: random.Random, container: Any, key: Any) -> None:  # noqa: ANN401 # JSON
    if isinstance(container, list):
        container.extend(deepcopy(container[key]) for _ in range(source.randint(1, 50)))
    else:
        container[source.choice(_NAMES)] = deepcopy(container[key])
