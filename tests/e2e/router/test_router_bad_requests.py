import json
from collections.abc import Iterator

import pytest

from services.router.settings import RouterSettings
from tests.bad_requests import BadRequest, bad_requests
from tests.router_stack import RouterStack, wait_until
from tests.stub_worker import CONTEXT_LENGTH, MODEL_NAME

GOOD = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    with RouterStack() as stack:
        yield stack


@pytest.mark.parametrize("bad", bad_requests(MODEL_NAME, CONTEXT_LENGTH), ids=lambda bad: bad.name)
def test_bad_input_is_refused_with_the_field_named(stack: RouterStack, bad: BadRequest) -> None:
    content = bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body).encode()
    response = stack.http.request(bad.method, bad.path, content=content)
    assert response.status_code == bad.status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert bad.field in (error["param"] or "") or bad.field in error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    assert response.headers["x-should-retry"] == "false"


def test_the_server_lost_nothing(stack: RouterStack) -> None:
    response = stack.http.post("/v1/chat/completions", json=GOOD)
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == stack.worker.reply
    wait_until(lambda: not stack.cache.leases)
    assert stack.worker.num_running == 0


def test_overflow_says_the_numbers(stack: RouterStack) -> None:
    body = GOOD | {"max_tokens": CONTEXT_LENGTH}
    error = stack.http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT_LENGTH) in error["message"]


def test_unknown_fields_are_ignored_and_named(stack: RouterStack) -> None:
    response = stack.http.post("/v1/chat/completions", json=GOOD | {"frobnicate": 1, "user": "me"})
    assert response.status_code == 200
    assert response.headers["x-hypic-ignored-fields"] == "frobnicate"


def test_body_limit_and_api_key() -> None:
    settings = RouterSettings(max_body_bytes=1000, api_key="secret-key")  # type: ignore[arg-type] # pydantic converts
    with RouterStack(settings) as stack:
        refused = stack.http.post("/v1/chat/completions", json=GOOD)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        key = {"authorization": "Bearer secret-key"}
        assert stack.http.post("/v1/chat/completions", json=GOOD, headers=key).status_code == 200
        large = GOOD | {"user": "x" * 2000}
        announced = stack.http.post("/v1/chat/completions", json=large, headers=key)
        assert announced.status_code == 413
        chunks = iter([json.dumps(large).encode()])
        streamed = stack.http.post("/v1/chat/completions", content=chunks, headers=key)
        assert streamed.status_code == 413
        assert streamed.json()["error"]["code"] == "request_too_large"
        assert stack.http.get("/v1/models").status_code == 401
        assert stack.http.get("/health/live").status_code == 200
