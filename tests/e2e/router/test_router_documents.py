"""Documents over HTTP where a service behind the router is slow, away, or refuses."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.router_stack import RouterStack, wait_until

DOCUMENT = {"id": "one", "text": "The river city has a long history of trade and bridges. " * 4}


@pytest.fixture
def stack() -> Iterator[RouterStack]:
    with RouterStack() as stack:
        yield stack
        wait_until(lambda: not stack.cache.leases)


def error_of(response: httpx2.Response) -> tuple[int, str]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


def test_without_the_cache_service_nothing_is_promised(stack: RouterStack) -> None:
    stack.stop(stack.cache_server)
    for method, path in (
        ("POST", "/v1/documents"),
        ("GET", "/v1/documents"),
        ("GET", "/v1/documents/one"),
        ("DELETE", "/v1/documents/one"),
        ("DELETE", "/v1/pins?document=one"),
    ):
        response = stack.http.request(method, path, json=DOCUMENT)
        assert error_of(response) == (503, "cache_unavailable")
        assert response.headers["retry-after"]
        assert "127.0.0.1" not in response.text
    assert error_of(stack.http.post("/v1/invalidate", json={"tag": "t"})) == (503, "cache_unavailable")
    assert error_of(stack.http.post("/v1/pins", json={"document": "one"})) == (503, "cache_unavailable")


def test_a_failed_capture_leaves_the_document_registered(stack: RouterStack) -> None:
    stack.worker.failing_captures = True
    done = stack.http.post("/v1/documents", json=DOCUMENT).json()
    assert (done["outcome"], done["status"]) == ("created", "not_stored")
    assert done["reason"]
    assert stack.http.get("/v1/documents/one").json()["registered"]
    stack.worker.failing_captures = False
    assert stack.http.post("/v1/documents", json=DOCUMENT).json()["status"] == "stored"


def test_the_same_document_at_once_is_captured_once(stack: RouterStack) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: stack.http.post("/v1/documents", json=DOCUMENT).json(), range(8)))
    assert {answer["status"] for answer in answers} == {"stored"}
    assert len(stack.cache.resident) == 1
    assert len(stack.worker.captures) == 1


def test_the_call_after_a_lost_one_is_the_same_call(stack: RouterStack) -> None:
    first, second = (stack.http.post("/v1/documents", json=DOCUMENT).json() for _ in range(2))
    assert first["id"] == second["id"] == "one"
    assert first["digest"] == second["digest"]
