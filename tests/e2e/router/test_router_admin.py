"""What an administrator asks of the router, against stub services."""

from collections.abc import Iterator

import pytest
from hypic.v1 import cache_pb2

from tests.router_stack import RouterStack


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    with RouterStack() as running:
        yield running


def test_evictions_are_listed_as_the_cache_service_has_them(stack: RouterStack) -> None:
    assert stack.http.get("/admin/evictions").json() == {"object": "list", "data": []}
    row = cache_pb2.Eviction(evictor="acme", victim="beta", num_entries=3, size_bytes=900, num_tokens=300)
    stack.cache.evictions = [row]
    shown = {"object": "eviction", "evictor": "acme", "victim": "beta", "entries": 3, "bytes": 900, "tokens": 300}
    assert stack.http.get("/admin/evictions").json()["data"] == [shown]


def test_without_the_cache_service_there_is_an_error_that_may_be_repeated(stack: RouterStack) -> None:
    stack.cache.is_down = True
    answer = stack.http.get("/admin/evictions")
    stack.cache.is_down = False
    assert answer.status_code == 503
    assert answer.json()["error"]["type"]
    assert int(answer.headers["retry-after"]) > 0
