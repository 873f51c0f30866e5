"""Tenants apart: API keys over HTTP against the real stack, each claim beside its opposite."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.router.domain.tenancy import hash_key
from tests.e2e.stack.asking import CHAT, Answer, ask, body, document
from tests.e2e.stack.callers import Client, client_of, key_sections, secret_of
from tests.e2e.stack.served import ServedStack, wait_until

KEYS = {
    "acme": ("acme", '"generate", "documents"'),
    "other": ("other", '"generate", "documents"'),
    "reader": ("acme", '"generate"'),
    "librarian": ("acme", '"documents"'),
    "small": ("small", '"generate"'),
    "root": ("operations", '"admin"'),
}
QUOTAS = "[tenants.small]\nmax_requests_in_flight = 1\nmax_state_bytes = 1000\n"


def key_file(*names: str) -> str:
    return QUOTAS + key_sections({name: KEYS[name] for name in names})


class Guarded:
    """A stack with API keys, and a client for each."""

    def __init__(self, stack: ServedStack, path: Path, log: Path) -> None:
        self.stack = stack
        self.path = path
        self.log = log
        self.clients = {name: client_of(name, stack.model, stack.base_url) for name in KEYS}

    def __getitem__(self, name: str) -> Client:
        return self.clients[name]

    def close(self) -> None:
        for client in self.clients.values():
            client.http.close()


@pytest.fixture(scope="module")
def guarded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    path = folder / "keys.toml"
    path.write_text(key_file(*KEYS))
    variables = {"HYPIC_ROUTER_API_KEYS_FILE": str(path), "HYPIC_ROUTER_DEFAULT_MAX_TOKENS": "16"}
    with ServedStack(checkpoint, folder / "log", variables) as stack:
        made = Guarded(stack, path, folder / "log")
        yield made
        made.close()


def refusal(response: httpx2.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


def ask_as(client: Client, asked: list[Any], **more: Any) -> Answer:  # noqa: ANN401 # JSON
    return ask(client, asked, **more)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic secret of acme", "secret of acme"])
def test_without_a_known_key_nothing_is_served(guarded: Guarded, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    for method, path in (
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/documents"),
        ("POST", "/v1/documents"),
        ("DELETE", "/v1/documents/x"),
        ("POST", "/v1/invalidate"),
        ("POST", "/v1/pins"),
        ("DELETE", "/v1/pins"),
        ("GET", "/admin/evictions"),
    ):
        response = httpx2.request(method, guarded.stack.base_url + path, json={}, headers=headers, timeout=20)
        assert refusal(response) == (401, "invalid_api_key")
    assert httpx2.get(f"{guarded.stack.base_url}/health/live", timeout=20).status_code == 200


@pytest.mark.parametrize(
    ("name", "method", "path", "sent"),
    [
        ("reader", "GET", "/v1/documents", None),
        ("reader", "DELETE", "/v1/documents/x", None),
        ("librarian", "POST", CHAT, {}),
        ("acme", "POST", "/v1/documents", {"text": "a", "namespace": "public"}),
        ("acme", "DELETE", "/v1/documents/x?namespace=public", None),
        ("acme", "GET", "/v1/documents?namespace=public", None),
        ("acme", "POST", "/v1/invalidate", {"model": "m"}),
        ("acme", "POST", "/v1/invalidate", {"tenant": "other"}),
        ("acme", "POST", "/v1/invalidate", {"tenant": "public"}),
        ("acme", "POST", "/v1/invalidate", {"tag": "t", "namespace": "public"}),
        ("acme", "POST", "/v1/pins", {"document": "x"}),
        ("acme", "DELETE", "/v1/pins?document=x", None),
        ("acme", "GET", "/admin/evictions", None),
    ],
)
def test_a_key_without_the_scope_is_refused(
    guarded: Guarded, name: str, method: str, path: str, sent: dict[str, Any] | None
) -> None:
    assert refusal(guarded[name].http.request(method, path, json=sent)) == (403, "insufficient_scope")


@pytest.mark.parametrize(("reuse", "hit"), [("compose", "hit"), ("exact", "prefix")])
def test_a_tenant_and_a_salt_meet_only_themselves(guarded: Guarded, reuse: str, hit: str) -> None:
    asked = [document(f"apart {reuse}"), document(f"apart too {reuse}")]
    expected = ask_as(guarded["acme"], asked, reuse=reuse, cache_salt="s").text
    assert ask_as(guarded["acme"], asked, reuse=reuse, cache_salt="s").served == [hit] * 2
    assert ask_as(guarded["reader"], asked, reuse=reuse, cache_salt="s").served == [hit] * 2
    for name, salt in (("acme", "t"), ("acme", ""), ("other", "s"), ("other", "")):
        more = {"cache_salt": salt} if salt else {}
        answer = ask_as(guarded[name], asked, reuse=reuse, **more)
        assert hit not in answer.served
        assert answer.text == expected


def test_what_is_revoked_old_or_of_an_old_epoch_misses(guarded: Guarded) -> None:
    acme, other = guarded["acme"], guarded["other"]

    def stored(name: str) -> dict[str, str]:
        made = document(name) | {"id": name}
        for client in (acme, other):
            client.call("POST", "/v1/documents", json=made | {"tags": ["t"]})
            assert ask_as(client, [made]).served == ["hit"]
        return made

    revoked = stored("revoked")
    acme.call("DELETE", "/v1/documents/revoked")
    assert [ask_as(client, [revoked]).served for client in (acme, other)] == [["cold"], ["hit"]]
    old = stored("versioned")
    acme.call("POST", "/v1/documents", json=old | {"text": old["text"] + " new"})
    assert [ask_as(client, [old]).served for client in (acme, other)] == [["live"], ["hit"]]
    epoch = stored("epoch")
    acme.call("POST", "/v1/invalidate", json={"tenant": "acme"})
    assert [ask_as(client, [epoch]).served for client in (acme, other)] == [["cold"], ["hit"]]
    tagged = stored("tagged")
    acme.call("POST", "/v1/invalidate", json={"tag": "t"})
    assert [ask_as(client, [tagged]).served for client in (acme, other)] == [["cold"], ["hit"]]
    weights = stored("weights")
    model = acme.call("GET", "/v1/models")["data"][0]["revision"]
    assert guarded["root"].call("POST", "/v1/invalidate", json={"model": "another"})["entries"] == 0
    assert ask_as(acme, [weights]).served == ["hit"]
    assert guarded["root"].call("POST", "/v1/invalidate", json={"model": model})["entries"] > 0
    assert [ask_as(client, [weights]).served for client in (acme, other)] == [["cold"], ["cold"]]


def test_what_an_administrator_made_public_serves_all(guarded: Guarded) -> None:
    shared, own = document("shared") | {"id": "shared"}, document("kept") | {"id": "kept"}
    guarded["root"].call("POST", "/v1/documents", json=shared | {"namespace": "public"})
    guarded["acme"].call("POST", "/v1/documents", json=own)
    answers = [ask_as(guarded[name], [shared, own]) for name in ("acme", "other")]
    assert [answer.served for answer in answers] == [["hit", "hit"], ["hit", "cold"]]
    assert answers[0].text == answers[1].text
    assert guarded["acme"].http.get("/v1/documents/shared").status_code == 404
    # A tenant that deletes its own document of this name leaves the public one alone.
    assert refusal(guarded["acme"].http.delete("/v1/documents/shared")) == (404, "document_not_found")
    assert ask_as(guarded["acme"], [shared]).served == ["hit"]
    guarded["root"].call("DELETE", "/v1/documents/shared?namespace=public")
    assert ask_as(guarded["acme"], [shared]).served == ["cold"]


def test_documents_of_others_are_not_seen(guarded: Guarded) -> None:
    made = document("private") | {"id": "private"}
    guarded["acme"].call("POST", "/v1/documents", json=made)
    for method in ("GET", "DELETE"):
        assert refusal(guarded["other"].http.request(method, "/v1/documents/private")) == (404, "document_not_found")
    listed = guarded["other"].call("GET", "/v1/documents", params={"limit": 100})["data"]
    assert "private" not in [row["id"] for row in listed]
    assert guarded["librarian"].call("GET", "/v1/documents/private")["registered"]


def test_an_administrator_pins_documents_of_any_tenant(guarded: Guarded) -> None:
    """A tenant as a whole only where it has a bound; what was refused says how much would be kept."""
    root, pinned = guarded["root"], document("pinned") | {"id": "a/pinned/pin"}
    guarded["acme"].call("POST", "/v1/documents", json=pinned)
    (state,) = guarded["acme"].call("GET", "/v1/documents/a/pinned/pin")["states"]
    done = root.call("POST", "/v1/pins", json={"document": "a/pinned/pin", "tenant": "acme"})
    assert {name: done[name] for name in ("object", "tenant", "document", "pinned", "entries")} == {
        "object": "pin",
        "tenant": "acme",
        "document": "a/pinned/pin",
        "pinned": True,
        "entries": 1,
    }
    assert (done["promised_bytes"], done["limit_bytes"]) == (state["bytes"], 1 << 30)
    assert guarded["acme"].call("GET", "/v1/documents/a/pinned/pin")["pinned"]
    assert root.call("POST", "/v1/pins", json={"tenant": "small"})["promised_bytes"] == state["bytes"] + 1000
    refused = root.http.post("/v1/pins", json={"tenant": "acme"})
    assert refusal(refused) == (409, "pin_limit")
    assert "HYPIC_CACHE_PINNED_SHARE" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    root.call("DELETE", "/v1/pins", params={"tenant": "small"})
    ended = root.call("DELETE", "/v1/pins", params={"tenant": "acme", "document": "a/pinned/pin"})
    assert (ended["pinned"], ended["promised_bytes"]) == (False, 0)
    assert not guarded["acme"].call("GET", "/v1/documents/a/pinned/pin")["pinned"]
    # The administrator's own tenant is another one.
    assert root.call("POST", "/v1/pins", json={"document": "a/pinned/pin"})["entries"] == 0
    assert root.call("DELETE", "/v1/pins", params={"document": "a/pinned/pin"})["tenant"] == "operations"


@pytest.mark.parametrize(
    "sent", [{}, {"document": ""}, {"document": 5}, {"tenant": ""}, {"pin": "x"}, [], {"document": "x" * 513}]
)
def test_a_pin_that_says_nothing_is_refused(guarded: Guarded, sent: Any) -> None:  # noqa: ANN401 # JSON
    response = guarded["root"].http.post("/v1/pins", json=sent)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("document", "tenant", "pin", "body")


def test_a_tenant_over_its_quotas_is_refused_or_computed(guarded: Guarded) -> None:
    small = guarded["small"]
    first, again = (ask_as(small, [document("over quota")]) for _ in range(2))
    # What the directory refuses serves the request that computed it, and no other.
    assert (first.served, again.served) == (["cold"], ["cold"])
    assert again.text == first.text
    asked = body(small, [document("in flight")], max_tokens=64)
    with ThreadPoolExecutor(4) as pool:
        responses = list(pool.map(lambda _: small.http.post(CHAT, json=asked), range(8)))
    statuses = {response.status_code for response in responses}
    assert statuses <= {200, 429}
    assert 200 in statuses
    # Whoever was refused may come again.
    assert ask_as(small, [document("in flight")]).text
    assert ask_as(guarded["acme"], [document("beside")]).served == ["cold"]


def test_a_stream_counts_until_it_ends(guarded: Guarded) -> None:
    small = guarded["small"]
    asked = body(small, [], "Tell me more.", max_tokens=400) | {"stream": True}
    with small.http.stream("POST", CHAT, json=asked) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        refused = small.http.post(CHAT, json=body(small, []))
        is_over = "data: [DONE]" in list(lines)
    assert is_over
    # A short reply may have ended by then; what was refused was refused in words.
    assert refused.status_code == 200 or refusal(refused) == (429, "tenant_limit")
    wait_until(lambda: small.http.post(CHAT, json=body(small, [])).status_code == 200)


def test_a_revoked_key_ends_without_a_restart(guarded: Guarded) -> None:
    pid = guarded.stack.pid("router")
    fresh = guarded.path.with_suffix(".new")
    fresh.write_text(key_file(*(name for name in KEYS if name != "reader")))
    fresh.replace(guarded.path)
    wait_until(lambda: guarded["reader"].http.get("/v1/models").status_code == 401)
    assert guarded["acme"].http.get("/v1/models").status_code == 200
    fresh.write_text(key_file(*KEYS))
    fresh.replace(guarded.path)
    wait_until(lambda: guarded["reader"].http.get("/v1/models").status_code == 200)
    assert guarded.stack.pid("router") == pid


def test_no_secret_is_logged(guarded: Guarded) -> None:
    log = guarded.log.read_text()
    assert "api_keys_reloaded" in log
    for name in KEYS:
        assert secret_of(name) not in log
        assert hash_key(secret_of(name)).hex() not in log


def test_an_address_for_others_needs_keys(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "services.cli.main", "up", "--checkpoint", str(checkpoint), "--host", "0.0.0.0"]
    started = time.monotonic()
    done = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, f"after {time.monotonic() - started:.0f} s: {done.stderr}"
    assert "api_keys_file" in done.stderr
