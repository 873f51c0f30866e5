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

    def parameter_types(self) -> Mapping[str, str]:
        """The JSON type of each parameter that declares one by name."""
        found: dict[str, str] = {}
        value = json.loads(self.definition)
        for step in ("function", "parameters", "properties"):
            value = value.get(step)
            if not isinstance(value, dict):
                return found
        for name, schema in value.items():
            if isinstance(schema, dict) and isinstance(schema.get("type"), str):
                found[name] = schema["type"]
        return found


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call. `arguments`: the JSON text of an object."""

    call_id: str
    name: str
    arguments: str
