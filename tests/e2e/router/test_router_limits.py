"""What is too much is refused at once, in words, with when to come back; and no longer than it is too much."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from services.router.settings import RouterSettings
from tests.e2e.stack.asking import CHAT
from tests.e2e.stack.callers import client_of, key_sections
from tests.router_stack import RouterStack, wait_until
from tests.stub_worker import MODEL_NAME

BODY = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    settings = RouterSettings(max_header_bytes=4096, max_parts=8, max_requests_per_worker=2, max_queue_seconds=5.0)
    with RouterStack(settings) as running:
        yield running


def refusal(response: httpx2.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_large_head_is_refused(stack: RouterStack) -> None:
    for sent in ({"headers": {"x-large": "x" * 5000}}, {"params": {"q": "x" * 5000}}):
        response = stack.http.post(CHAT, json=BODY, **sent)  # type: ignore[arg-type] # either argument
        assert refusal(response) == (431, "request_head_too_large")
        assert response.headers["x-should-retry"] == "false"
    assert stack.http.post(CHAT, json=BODY, headers={"x-large": "x" * 2000}).status_code == 200


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"documents": [{"text": "a"}] * 8}, "documents"),
        ({"messages": [{"role": "user", "content": "a"}] * 9}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 8}]}, "messages"),
    ],
)
def test_too_many_parts_are_refused(stack: RouterStack, more: dict[str, object], param: str) -> None:
    response = stack.http.post(CHAT, json=BODY | more)
    assert refusal(response) == (400, "too_many_parts")
    assert response.json()["error"]["param"] == param
    assert response.headers["x-should-retry"] == "false"


def test_a_full_worker_sheds_and_recovers_at_once(stack: RouterStack) -> None:
    """Both streams that it may have are running: the third is refused with when to come back; one ends, and it is let in."""
    stack.worker.token_delay_seconds, stack.worker.num_repeats = 0.05, 50
    try:
        long = BODY | {"stream": True, "max_tokens": 1000}
        with stack.http.stream("POST", CHAT, json=long) as first:
            first_lines = first.iter_lines()
            assert next(first_lines)
            with stack.http.stream("POST", CHAT, json=long) as second:
                second_lines = second.iter_lines()
                assert next(second_lines)
                refused = stack.http.post(CHAT, json=BODY)
                assert refusal(refused) == (429, "overloaded")
                assert int(refused.headers["retry-after"]) >= 1
            wait_until(lambda: stack.worker.num_running == 1)
            wait_until(lambda: stack.http.post(CHAT, json=BODY).status_code == 200)
    finally:
        stack.worker.token_delay_seconds, stack.worker.num_repeats = 0.0, 1


def test_tenants_have_limits_of_their_own_by_default() -> None:
    with RouterStack(RouterSettings(tenant_requests_per_minute=3)) as limited:
        answers = [limited.http.post(CHAT, json=BODY) for _ in range(5)]
        assert [each.status_code for each in answers] == [200, 200, 200, 429, 429]
        assert refusal(answers[-1]) == (429, "tenant_limit")
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 20
        # Reading what there is stays free.
        assert limited.http.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("asked", "given"), [({}, 2), ({"priority": -7}, 2), ({"priority": 2}, 2), ({"priority": 9}, 9)]
)
def test_nobody_gets_ahead_by_asking(tmp_path: Path, asked: dict[str, int], given: int) -> None:
    """A key whose tenant may have 2 at the soonest."""
    keys = tmp_path / "keys.toml"
    keys.write_text("[tenants.batch]\nmin_priority = 2\n" + key_sections({"batch": ("batch", '"generate"')}))
    with RouterStack(RouterSettings(api_keys_file=keys)) as guarded:
        caller = client_of("batch", MODEL_NAME, guarded.url)
        with caller.http:
            assert caller.http.post(CHAT, json=BODY | asked).status_code == 200
        assert guarded.worker.requests[-1].priority == given


def test_workers_tell_tenants_apart_without_their_names(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(key_sections({"acme-key": ("acme", '"generate"'), "umbra-key": ("umbra", '"generate"')}))
    with RouterStack(RouterSettings(api_keys_file=keys)) as guarded:
        for key in ("acme-key", "umbra-key", "acme-key"):
            caller = client_of(key, MODEL_NAME, guarded.url)
            with caller.http:
                assert caller.http.post(CHAT, json=BODY).status_code == 200
        first, other, again = [request.tenant for request in guarded.worker.requests[-3:]]
    assert first == again != other
    assert b"acme" not in first
    assert len(first) == len(other) == 8


def test_a_priority_is_a_number_and_one_of_its_own_without_keys(stack: RouterStack) -> None:
    assert stack.http.post(CHAT, json=BODY | {"priority": -7}).status_code == 200
    assert stack.worker.requests[-1].priority == -7
    response = stack.http.post(CHAT, json=BODY | {"priority": "high"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
