"""The OpenAPI document: what every endpoint takes, answers and refuses."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.router.adapters.anthropic_schema import (
    ANTHROPIC_SHAPES,
    AnthropicMessage,
    AnthropicTool,
    CountBody,
    MessagesBody,
    ToolResultBlock,
    ToolUseBlock,
)
from services.router.adapters.library_schema import DocumentBody, InvalidateBody, PinBody
from services.router.adapters.reply_schemas import REPLIES
from services.router.adapters.schema import (
    AnthropicSource,
    ChatBody,
    CohereData,
    CohereDocument,
    CompletionBody,
    DocumentFields,
    DocumentPart,
    JsonSchemaFormat,
    MessageBody,
    ResponseFormat,
    StructuredOutputs,
    TextPart,
)
from services.router.adapters.shapes import ref
from services.router.adapters.tool_schema import CallBody, NamedChoiceBody, ToolBody

__all__ = ["describe", "install_openapi"]

Json = dict[str, Any]

_ABOUT = """Chat and completions in OpenAI's form, with documents that are reused wherever they stand in a prompt.
Errors have OpenAI's envelope. Every reply carries `x-request-id`: the caller's own, or one that was made."""
_BODIES: tuple[type[BaseModel], ...] = (
    AnthropicMessage,
    AnthropicTool,
    CountBody,
    MessagesBody,
    ToolResultBlock,
    ToolUseBlock,
    AnthropicSource,
    CallBody,
    ChatBody,
    CohereData,
    CohereDocument,
    CompletionBody,
    DocumentBody,
    DocumentFields,
    DocumentPart,
    InvalidateBody,
    MessageBody,
    PinBody,
    TextPart,
    NamedChoiceBody,
    ToolBody,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
_ERRORS = {
    400: "The request must be changed; `param` names the field.",
    401: "No known API key.",
    403: "The key lacks the scope.",
    404: "There is no such model or document.",
    409: "Pins would keep more than they may.",
    413: "The body is larger than this server takes.",
    429: "Too much is under way; `retry-after` says when to come back.",
    500: "A fault of this server.",
    503: "A service that is needed cannot be reached now; `retry-after` says when to come back.",
    504: "The request took longer than the time allowed.",
}


def describe(  # noqa: PLR0913 # keywords, each one line of the document
    summary: str,
    reply: str,
    *,
    body: str = "",
    example: Json | None = None,
    streams: str = "",
    errors: Sequence[int] = (),
    error: str = "Error",
    query: Sequence[Json] = (),
) -> Json:
    """What a route adds to the document, as keywords of `add_api_route`.

    body, reply, streams, error: names of schemas, of the request, the reply, an event of its stream and a refusal; errors:
    statuses, as they are explained everywhere.
    """
    content: Json = {"application/json": {"schema": ref(reply)}}
    if streams:
        event = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref(streams)}
        data = {"anyOf": [{"const": "[DONE]"}, event]}
        content["text/event-stream"] = {
            "schema": {"type": "object", "properties": {"data": data}, "required": ["data"]}
        }
    responses: dict[int, Json] = {200: {"description": "The reply.", "content": content}}
    responses |= {status: _error(status, error) for status in errors}
    extra: Json = {"parameters": list(query)} if query else {}
    if body:
        media: Json = {"schema": ref(body)} | ({"example": example} if example else {})
        extra["requestBody"] = {"required": True, "content": {"application/json": media}}
    return {"summary": summary, "responses": responses, "openapi_extra": extra}


def install_openapi(app: FastAPI, version: str) -> None:
    """Serve the document of an application's routes, made once, when it is first asked for."""

    def document() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, version)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign] # FastAPI's own way to change it


def _document(app: FastAPI, version: str) -> Json:
    document = get_openapi(title="HYPIC", version=version, description=_ABOUT, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            # The framework's own refusal, which never leaves this server.
            operation["responses"].pop("422", None)
            operation["security"] = [{"bearer": []}, {}]
    document["components"] = {
        "schemas": _schemas(),
        "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
    }
    return document


def _schemas() -> Json:
    made: Json = models_json_schema(
        [(model, "validation") for model in _BODIES], ref_template="#/components/schemas/{model}"
    )[1]["$defs"]
    # One name a thing, as clients know it.
    made["Message"] = made.pop("MessageBody")
    plain = {"type": "string", "minLength": 1}
    made["Document"] = {"anyOf": [plain, ref("DocumentFields"), ref("CohereDocument")]}
    text = _typed(made.pop("TextPart"), "text")
    part = _typed(made.pop("DocumentPart"), "document")
    return (
        made
        | {"TextPart": text, "DocumentPart": part, "ContentPart": {"anyOf": [ref("TextPart"), ref("DocumentPart")]}}
        | ANTHROPIC_SHAPES
        | REPLIES
    )


def _typed(schema: Json, kind: str) -> Json:
    properties = {"type": {"const": kind, "type": "string", "description": "The kind of part."}} | schema["properties"]
    return schema | {"properties": properties, "required": ["type", *schema.get("required", [])]}


def _error(status: int, schema: str) -> Json:
    return {"description": _ERRORS[status], "content": {"application/json": {"schema": ref(schema)}}}
