"""Tools that a client offers, and calls of them."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Tool", "ToolCall", "json_text", "new_call_id"]


def json_text(value: Any) -> str:  # noqa: ANN401 # any JSON value
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def new_call_id() -> str:
    """An id for a call that the model makes."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `definition`: the client's whole object, as JSON in its own order of keys.

    `is_breakpoint`: the client wants a prefix snapshot behind the tools.
    """

    name: str
    definition: str
    is_breakpoint: bool = False

    def parameters(self) -> dict[str, Any]:
        """The JSON Schema of the arguments; empty where there is none."""
        return json.loads(self.definition)["function"].get("parameters") or {}

    def parameter_types(self) -> Mapping[str, str]:
        """The JSON type of each parameter that declares one by name."""
        properties = self.parameters().get("properties")
        if not isinstance(properties, dict):
            return {}
        schemas = {name: schema for name, schema in properties.items() if isinstance(schema, dict)}
        return {name: schema["type"] for name, schema in schemas.items() if isinstance(schema.get("type"), str)}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call. `arguments`: the JSON text of an object."""

    call_id: str
    name: str
    arguments: str
