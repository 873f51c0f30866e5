"""What the OpenAPI document says of fields that `schema` leaves raw, because they hold a choice of shapes."""

from typing import Any

from pydantic import WithJsonSchema

__all__ = [
    "CALLS",
    "CONTENT",
    "DATA",
    "DOCUMENT",
    "DOCUMENTS",
    "GUIDED_CHOICE",
    "GUIDED_JSON",
    "GUIDED_TEXT",
    "MAX_CALLS",
    "MAX_PROMPTS",
    "MAX_TOOLS",
    "MESSAGES",
    "PROMPT",
    "RESPONSE_FORMAT",
    "SCHEMA_FORMAT",
    "SOURCE",
    "STOPS",
    "STRUCTURED",
    "TEXT_PARTS",
    "TOOLS",
    "TOOL_CHOICE",
    "list_of",
    "ref",
]

MAX_TOOLS = 128
MAX_PROMPTS = 32
MAX_CALLS = 128


def ref(name: str) -> dict[str, str]:
    """A reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def list_of(item: dict[str, Any], fewest: int = 0, most: int | None = None) -> dict[str, Any]:
    """An array of these items."""
    schema: dict[str, Any] = {"type": "array", "items": item}
    if fewest:
        schema["minItems"] = fewest
    return schema if most is None else schema | {"maxItems": most}


_TEXT = {"type": "string"}
_STOP = {"type": "string", "minLength": 1, "maxLength": 256}

CONTENT = WithJsonSchema({"anyOf": [_TEXT, list_of(ref("ContentPart"), 1), {"type": "null"}]})
TOOLS = WithJsonSchema(list_of(ref("ToolBody"), 0, MAX_TOOLS))
TOOL_CHOICE = WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required", None]}, ref("NamedChoiceBody")]})
CALLS = WithJsonSchema({"anyOf": [list_of(ref("CallBody"), 0, MAX_CALLS), {"type": "null"}]})
MESSAGES = WithJsonSchema(list_of(ref("Message"), 1))
DOCUMENTS = WithJsonSchema(list_of(ref("Document")))
STOPS = WithJsonSchema({"anyOf": [_STOP, list_of(_STOP, 0, 4), {"type": "null"}]})
PROMPT = WithJsonSchema(
    {"anyOf": [{"type": "string", "minLength": 1}, list_of({"type": "string", "minLength": 1}, 1, MAX_PROMPTS)]}
)
DATA = WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, ref("CohereData")]})
DOCUMENT = WithJsonSchema({"anyOf": [ref("Document"), {"type": "null"}]})
SOURCE = WithJsonSchema({"anyOf": [ref("AnthropicSource"), {"type": "null"}]})
TEXT_PARTS = WithJsonSchema(list_of({"anyOf": [_TEXT, ref("TextPart")]}, 1))
RESPONSE_FORMAT = WithJsonSchema({"anyOf": [ref("ResponseFormat"), {"type": "null"}]})
SCHEMA_FORMAT = WithJsonSchema({"anyOf": [ref("JsonSchemaFormat"), {"type": "null"}]})
STRUCTURED = WithJsonSchema({"anyOf": [ref("StructuredOutputs"), {"type": "null"}]})
GUIDED_JSON = WithJsonSchema({"anyOf": [{"type": "object"}, _TEXT, {"type": "null"}]})
GUIDED_TEXT = WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]})
GUIDED_CHOICE = WithJsonSchema({"anyOf": [list_of({"type": "string", "minLength": 1}, 1, 1024), {"type": "null"}]})
