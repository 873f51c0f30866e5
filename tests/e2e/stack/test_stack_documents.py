"""The life of documents over HTTP: registered ahead, replaced, described, listed, deleted, invalidated."""

from typing import Any

import pytest

from tests.e2e.stack.asking import ask, document
from tests.e2e.stack.served import ServedStack, wait_until

DOCUMENTS = "/v1/documents"


def named(name: str, version: str = "") -> dict[str, str]:
    """A document with an id; another text for every version."""
    return document(f"{name} {version}") | {"id": name, "title": name}


def register(stack: ServedStack, body: dict[str, Any], **more: object) -> dict[str, Any]:
    response = stack.http.post(DOCUMENTS, json=body | more)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def find(stack: ServedStack, name: str) -> dict[str, Any]:
    response = stack.http.get(f"{DOCUMENTS}/{name}")
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def error_of(response: Any) -> tuple[int, str, str | None]:  # noqa: ANN401 # httpx2's response
    """Status, code and param of an error; the envelope is checked."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"], error["param"]


def test_a_registered_document_is_a_hit_at_its_first_use(stack: ServedStack) -> None:
    first = named("ahead")
    before = stack.captures()
    done = register(stack, first, tags=["hr", "hr"])
    assert (done["outcome"], done["status"], done["tags"]) == ("created", "stored", ["hr"])
    assert stack.captures() == before + 1
    assert ask(stack, [first]).served == ["hit"]
    shown = find(stack, "ahead")
    (state,) = shown["states"]
    assert shown["registered"]
    assert shown["version"] == done["version"]
    assert shown["tokens"] == state["tokens"] == ask(stack, [first]).segments[0]["tokens"]
    assert shown["bytes"] == state["bytes"] > 0
    assert [holder["tier"] for holder in state["holders"]] == ["host"]
    assert len(bytes.fromhex(state["key"])) == 16
    again = register(stack, first, tags=["hr"])
    assert (again["outcome"], again["version"]) == ("unchanged", done["version"])
    assert stack.captures() == before + 1


@pytest.mark.parametrize("reuse", ["compose", "exact"])
def test_a_replaced_text_is_unreachable_at_once(stack: ServedStack, reuse: str) -> None:
    name = f"replaced {reuse}"
    old, new, beside = named(name, "one"), named(name, "two"), document(f"beside {name}")
    register(stack, old)
    expected = ask(stack, [old, beside], reuse=reuse).text
    assert set(ask(stack, [old, beside], reuse=reuse).served) == {{"compose": "hit", "exact": "prefix"}[reuse]}
    answer = register(stack, new)
    assert (answer["outcome"], answer["status"]) == ("replaced", "stored")
    assert answer["removed"]["entries"] >= 1
    assert all(copy["dropped"] for copy in answer["removed"]["copies"])
    late = ask(stack, [old, beside], reuse=reuse)
    assert late.served[0] == "live"
    assert late.text == expected or reuse == "compose"
    if reuse == "compose":
        assert late.segments[0]["reason"] == "superseded"
        assert ask(stack, [old, beside]).segments[0]["reason"] == "superseded"
        assert ask(stack, [new, beside]).served == ["hit", "hit"]
    # Not stored as a snapshot either, however often it is asked.
    assert ask(stack, [old, beside], reuse=reuse).served[0] == "live"
    assert len(find(stack, name)["states"]) >= 1


def test_a_deleted_document_is_gone_with_a_receipt(stack: ServedStack) -> None:
    body = named("deleted/with a slash")
    register(stack, body)
    expected = ask(stack, [body]).text
    ask(stack, [body], reuse="exact")
    stored = find(stack, body["id"])
    assert {state["kind"] for state in stored["states"]} == {"segment", "prefix"}
    stack.wait_refreshed()
    pages = stack.gauge("worker", "hypic_worker_pages_free")
    receipt = stack.http.delete(f"{DOCUMENTS}/{body['id']}").json()
    assert receipt["deleted"]
    assert receipt["entries"] == len(stored["states"])
    assert receipt["bytes"] == stored["bytes"]
    assert [(copy["tier"], copy["dropped"]) for copy in receipt["copies"]] == [("host", True)]
    assert error_of(stack.http.get(f"{DOCUMENTS}/{body['id']}")) == (404, "document_not_found", "id")
    assert error_of(stack.http.delete(f"{DOCUMENTS}/{body['id']}")) == (404, "document_not_found", "id")
    wait_until(lambda: stack.gauge("worker", "hypic_worker_pages_free") > pages)
    again = ask(stack, [body])
    assert (again.served, again.text) == (["cold"], expected)
    assert not find(stack, body["id"])["registered"]


def test_a_tag_takes_its_documents_along(stack: ServedStack) -> None:
    bodies = [named(f"tagged {index}") for index in range(3)]
    for body, tags in zip(bodies, (["a"], ["a", "b"], ["b"]), strict=True):
        register(stack, body, tags=tags)
    assert ask(stack, bodies).served == ["hit"] * 3
    receipt = stack.http.post("/v1/invalidate", json={"tag": "a"}).json()
    assert (receipt["documents"], receipt["entries"]) == (2, 2)
    assert ask(stack, bodies).served == ["cold", "cold", "hit"]


def test_documents_are_listed_by_id(stack: ServedStack) -> None:
    names = [f"listed {index}" for index in range(5)]
    for name in names[::-1]:
        register(stack, named(name))
    seen: list[str] = []
    page: dict[str, Any] = {"has_more": True, "last_id": "listed"}
    while page["has_more"]:
        page = stack.http.get(DOCUMENTS, params={"limit": 2, "after": page["last_id"]}).json()
        seen += [row["id"] for row in page["data"]]
    assert [name for name in seen if name.startswith("listed ")] == names
    assert seen == sorted(seen)


def test_text_parts_and_text_are_one_document(stack: ServedStack) -> None:
    whole = document("joined")
    middle = len(whole["text"]) // 2
    parts = [whole["text"][:middle], {"type": "text", "text": whole["text"][middle:]}]
    first = register(stack, {"parts": parts, "title": whole["title"]})
    second = register(stack, whole)
    assert (second["id"], second["outcome"]) == (first["id"], "unchanged")
    assert ask(stack, [whole]).served == ["hit"]


def test_a_short_document_is_registered_and_computed_in_place(stack: ServedStack) -> None:
    done = register(stack, {"id": "short", "text": "a king"})
    assert (done["status"], done["reason"], done["states"]) == ("too_short", "too_short", [])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": "a", "parts": ["b"]}, "text"),
        ({"parts": [{"type": "image", "text": "a"}]}, "parts[0].type"),
        ({"parts": [1]}, "parts[0]"),
        ({"text": "a", "id": ""}, "id"),
        ({"text": "a", "tags": [""]}, "tags[0]"),
        ({"text": "a", "tags": "hr"}, "tags"),
        ({"text": "a", "namespace": "other"}, "namespace"),
        ({"text": "a", "ttl": 3}, "ttl"),
        ({"text": "word " * 200_000}, "text"),
        ([], "body"),
    ],
)
def test_malformed_registrations_name_the_field(stack: ServedStack, body: object, param: str) -> None:
    response = stack.http.post(DOCUMENTS, json=body)
    status, _, named_param = error_of(response)
    assert (status, named_param) == (400, param), response.text


@pytest.mark.parametrize("body", [{}, {"tag": "a", "model": "b"}, {"tag": ""}, {"all": True}])
def test_malformed_invalidations_are_refused(stack: ServedStack, body: object) -> None:
    assert error_of(stack.http.post("/v1/invalidate", json=body))[0] == 400


@pytest.mark.parametrize("limit", ["0", "101", "-1", "x", "1e3", "٣"])
def test_malformed_pages_are_refused(stack: ServedStack, limit: str) -> None:
    assert error_of(stack.http.get(DOCUMENTS, params={"limit": limit}))[::2] == (400, "limit")


def test_an_id_without_text_is_told_to_bring_it(stack: ServedStack) -> None:
    register(stack, named("by id only"))
    body = {"model": stack.model, "messages": [{"role": "user", "content": "?"}], "documents": [{"id": "by id only"}]}
    response = stack.http.post("/v1/chat/completions", json=body)
    assert error_of(response) == (400, "missing_required_parameter", "documents[0].text")
    assert "texts are not kept" in response.json()["error"]["message"]
