"""The OpenAPI document names everything that the endpoints take, answer and refuse."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.router_stack import RouterStack
from tests.stub_worker import MODEL_NAME


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    with RouterStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def document(stack: RouterStack) -> dict[str, Any]:
    found: dict[str, Any] = stack.http.get("/openapi.json").json()
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def test_endpoints(document: dict[str, Any]) -> None:
    assert {
        "post /v1/chat/completions",
        "post /v1/completions",
        "get /v1/models",
        "post /v1/documents",
        "get /v1/documents",
        "get /v1/documents/{document_id}",
        "delete /v1/documents/{document_id}",
        "post /v1/invalidate",
        "post /v1/pins",
        "delete /v1/pins",
        "get /admin/evictions",
        "get /health/ready",
    } <= {name for name, _ in operations(document)}


def test_everything_is_explained(document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        assert operation["summary"], name
        assert all(
            parameter.get("description") or parameter["in"] == "path" for parameter in operation.get("parameters", [])
        )
        if body := operation.get("requestBody"):
            assert body["content"]["application/json"]["example"], name
        if name.partition(" ")[2].startswith("/v1/"):
            assert {"401", "403"} <= operation["responses"].keys(), name
    schemas = document["components"]["schemas"]
    requests = [name for name in schemas if name.endswith(("Body", "Options", "Fields", "TextPart", "DocumentPart"))]
    assert "ChatBody" in requests
    unexplained = [
        f"{name}.{field}"
        for name in requests
        for field, schema in schemas[name].get("properties", {}).items()
        if not (schema.get("description") or "$ref" in schema)
    ]
    assert schemas["ChatBody"]["properties"]["documents"]["description"]
    assert unexplained == []


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    used = set(_references(document))
    assert used <= known
    assert len(used) > 20


def _references(value: Any) -> Iterator[str]:  # noqa: ANN401 # JSON
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


def test_examples_are_served(stack: RouterStack, document: dict[str, Any]) -> None:
    for name, operation in operations(document):
        if "requestBody" not in operation:
            continue
        method, _, path = name.partition(" ")
        example = operation["requestBody"]["content"]["application/json"]["example"]
        if "model" in example:
            example |= {"model": MODEL_NAME}
        response = stack.http.request(method.upper(), path, json=example)
        assert response.status_code == 200, (name, response.text)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("documents", {"documents": ["x"] * 4096}),
        ("messages", {"messages": [{"role": "user", "content": "x"}] * 4097}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4096}]}),
    ],
)
def test_counts_are_bounded(stack: RouterStack, field: str, body: dict[str, Any]) -> None:
    base = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "x"}]}
    response = stack.http.post("/v1/chat/completions", json=base | body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert "4096" in response.json()["error"]["message"]
    if "documents" not in body:
        counted = stack.http.post("/v1/messages/count_tokens", json={"model": MODEL_NAME} | body)
        assert "4096" in counted.json()["error"]["message"]


def test_request_ids_come_back_and_are_made(stack: RouterStack) -> None:
    given = stack.http.get("/v1/models", headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = [
        stack.http.get("/v1/nothing", headers={"x-request-id": "two words"}).headers["x-request-id"] for _ in range(2)
    ]
    assert len({*made, "two words", ""}) == 4
