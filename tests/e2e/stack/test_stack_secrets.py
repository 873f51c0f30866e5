"""A whole stack under mutual TLS and a key: states travel between workers, and neither keys nor prompts reach a log.

Nothing that a client sends is an address: workers are those of the settings.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.e2e.stack.asking import CHAT, ask, body, document
from tests.e2e.stack.callers import Client, client_of, secret_of
from tests.e2e.stack.served import ServedStack, wait_until

SECRET_WORDS = "the harbour code is violet seven"
ELSEWHERE = "127.0.0.1:9"


@pytest.fixture(scope="module")
def secured(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServedStack, Path]]:
    folder = tmp_path_factory.mktemp("secured")
    authority = Authority(folder / "authority")
    variables = {"HYPIC_ROUTER_API_KEY": secret_of("owner")}
    for service, name in (("ROUTER", "hypic-router"), ("CACHE", "hypic-cache"), ("WORKER", "hypic-worker")):
        variables |= authority.issue(name).variables(service)
    with ServedStack(random_checkpoint, folder / "log", variables, ["prefill", "combine"]) as stack:
        yield stack, folder / "log"


@pytest.fixture
def owner(secured: tuple[ServedStack, Path]) -> Iterator[Client]:
    stack, _ = secured
    client = client_of("owner", stack.model, stack.base_url)
    yield client
    client.http.close()


def test_states_travel_between_workers(owner: Client) -> None:
    """What one worker captures the other one fetches, over a connection on which both have shown who they are."""
    asked = document("travels", 150)
    cold = ask(owner, [asked])
    assert (cold.served, cold.segments[0]["fetch"]["worker"]) == (["cold"], "worker-0")
    wait_until(lambda: ask(owner, [asked]).served == ["hit"])
    assert ask(owner, [asked]).text == cold.text


def test_logs_hold_no_key_and_no_prompt(secured: tuple[ServedStack, Path], owner: Client) -> None:
    """Not of a request that is answered, and not of those that are refused."""
    stack, log = secured
    private = {"title": "Private", "text": f"{SECRET_WORDS}. " * 20}
    ask(owner, [private], question=f"Is it true that {SECRET_WORDS}?")
    for wrong in (
        {"temperature": SECRET_WORDS},
        {"messages": SECRET_WORDS},
        {"documents": [{"text": 1, SECRET_WORDS: 2}]},
    ):
        assert owner.http.post(CHAT, json=body(owner, [private]) | wrong).status_code == 400
    stranger = {"authorization": "Bearer violet-key-of-a-stranger"}
    assert stack.http.post(CHAT, json=body(owner, [private]), headers=stranger).status_code == 401
    text = log.read_text()
    assert '"event": "listening"' in text or "listening" in text
    for secret in (SECRET_WORDS, "harbour code", secret_of("owner"), "violet-key", "PRIVATE KEY"):
        assert secret not in text


def test_clients_choose_no_address(owner: Client) -> None:
    """In the body as in headers: what names a place changes nothing."""
    asked = document("addressed")
    right = ask(owner, [asked], reuse="off").text
    hidden = {"worker": ELSEWHERE, "workers": [ELSEWHERE], "sources": [{"worker_id": "x", "address": ELSEWHERE}]}
    headers = {
        "host": ELSEWHERE,
        "forwarded": f"for={ELSEWHERE};host={ELSEWHERE}",
        "x-forwarded-host": ELSEWHERE,
        "x-gateway-destination-endpoint": ELSEWHERE,
        "x-worker-address": ELSEWHERE,
    }
    request = body(owner, [asked], reuse="off") | hidden | {"kv_transfer_params": hidden}
    response = owner.http.post(CHAT, json=request, headers=headers)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == right
    assert ELSEWHERE not in json.dumps(response.json())
    refused = owner.http.post(CHAT, json=body(owner, [asked]) | {"hypic": {"worker": ELSEWHERE}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "hypic.worker")
