"""Whatever a client sends, the stack refuses it in words or answers it, and loses nothing."""

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.bad_requests import BadRequest, bad_requests
from tests.e2e.stack.asking import CHAT, ask, body, document
from tests.e2e.stack.served import ServedStack

NUM_MUTATIONS = 300
ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 17, 2**31, 2**63, 2**64, -(2**64), 0.5, -0.5, 1e-300, 1e308, "", " ", "x", "\x00", "\ud800",
    "é" * 300, "<|im_end|>", "compose", "off", [], [None], [[]], [1, 2], ["x"], [{}], {}, {"": ""}, {"text": "x"},
    {"type": "document", "text": "y"}, {"role": "user", "content": "z"}, [{"role": "assistant", "content": "z"}],
]  # fmt: skip


@pytest.fixture(scope="module")
def context_length(stack: ServedStack) -> int:
    return int(stack.http.get("/v1/models").json()["data"][0]["max_model_len"])


@pytest.fixture(autouse=True, scope="module")
def unharmed(stack: ServedStack) -> Iterator[None]:
    """After all tests of this module the stack answers as before and holds nothing more."""
    asked = [document("unharmed")]
    expected = ask(stack, asked).text
    stack.wait_idle()
    pids = stack.pids()
    yield
    assert ask(stack, asked).text == expected
    stack.wait_idle()
    assert stack.pids() == pids


def check_envelope(response: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    return error


def test_bad_input_is_refused_with_the_field_named(stack: ServedStack, context_length: int) -> None:
    for bad in bad_requests(stack.model, context_length):
        response = _send(stack, bad)
        assert response.status_code == bad.status, (bad.name, response.text)
        error = check_envelope(response)
        assert bad.field in (error["param"] or "") or bad.field in error["message"], bad.name
    assert ask(stack, [document("after bad input")]).served == ["cold"]


def _send(stack: ServedStack, bad: BadRequest) -> httpx2.Response:
    content = bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body).encode()
    return stack.http.request(bad.method, bad.path, content=content)


def test_mutated_requests_never_fail_inside(stack: ServedStack) -> None:
    source = random.Random(11)
    mutated = [_mutate(source, _draw_valid(source, stack)) for _ in range(NUM_MUTATIONS)]

    def send(content: bytes) -> int:
        response = stack.http.post(CHAT, content=content)
        if response.status_code >= 400:
            check_envelope(response)
        assert response.status_code < 500, (content, response.text)
        return response.status_code

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(send, mutated))
    # The pass means something only when both kinds were among them.
    assert statuses.count(200) > NUM_MUTATIONS / 20
    assert statuses.count(400) > NUM_MUTATIONS / 4


def _draw_valid(source: random.Random, stack: ServedStack) -> dict[str, Any]:
    content = [{"type": "text", "text": "What opens?"}, {"type": "document", "title": "t", "text": "A king opens."}]
    return body(
        stack,
        [document(f"mutated {source.randint(0, 5)}", 30), {"id": "a", "text": "The tower."}, "plain text"],
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": content}],
        max_tokens=2,
        stop=["x"],
        top_p=0.9,
        top_k=5,
        seed=1,
        stream=source.random() < 0.3,
        cache_salt="mutations",
    )


def _mutate(source: random.Random, request: dict[str, Any]) -> bytes:
    """One to three changes anywhere in the request, or a cut or broken byte of its JSON."""
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
    container[key] = source.choice(ODD_VALUES)


def _remove(_source: random.Random, container: Any, key: Any) -> None:  # noqa: ANN401 # JSON
    del container[key]


def _repeat(source: random.Random, container: Any, key: Any) -> None:  # noqa: ANN401 # JSON
    if isinstance(container, list):
        container.extend([container[key]] * source.randint(1, 50))
    else:
        container[source.choice(["extra", "text", "content", "id", "n", "logprobs"])] = container[key]
