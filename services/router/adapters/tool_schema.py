"""Tools, choices among them and calls as OpenAI's clients send them."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from services.router.adapters.fields import Strict, read, read_object
from services.router.adapters.schema import Marked
from services.router.domain.request import PromptError
from services.router.domain.tools import Tool, ToolCall, json_text

__all__ = ["CallBody", "NamedChoiceBody", "ToolBody", "read_calls", "read_tools"]

# Not part of what the model reads.
_MARKS = ("cache_control", "prompt_cache_breakpoint")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class FunctionBody(Strict):
    """What a tool does."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="Its name: letters, digits, `_` and `-`.", json_schema_extra={"pattern": f"^{_NAME.pattern}$"}
    )
    description: str | None = Field(default=None, description="What it does, for the model.")
    parameters: dict[str, Any] | None = Field(default=None, description="JSON Schema of its arguments.")
    strict: bool | None = Field(default=None, description="Accepted; only forced calls are held to their schema.")


class ToolBody(Marked):
    """A tool that the model may call."""

    type: Literal["function"] = Field(description="The kind of tool.")
    function: FunctionBody = Field(description="The function.")


class NamedFunction(Strict):
    """A function by its name."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="Its name among `tools`.")


class NamedChoiceBody(Strict):
    """The one function that the reply is to call."""

    type: Literal["function"] = Field(description="The kind of tool.")
    function: NamedFunction = Field(description="The function.")


class CalledBody(Strict):
    """The function of a call, and with what it was called."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="Its name.")
    arguments: str = Field(description="The arguments, as the JSON text of an object.")


class CallBody(Strict):
    """A call that the model has made in an earlier turn."""

    id: Annotated[str, Field(min_length=1, max_length=256)] = Field(description="The id that its result names.")
    type: Literal["function"] = Field(default="function", description="The kind of tool.")
    function: CalledBody = Field(description="What was called.")


def read_tools(values: Sequence[Any]) -> tuple[Tool, ...]:
    """Tools as they stand in a request.

    Raises:
        PromptError: one is malformed, or two have one name.
    """
    tools: dict[str, Tool] = {}
    for index, value in enumerate(values):
        path = f"tools[{index}]"
        body = read(ToolBody, value, path)
        name = body.function.name
        if not _NAME.fullmatch(name):
            raise PromptError(f"{path}.function.name may hold letters, digits, _ and -", param=f"{path}.function.name")
        if name in tools:
            raise PromptError(f"{path}.function.name: there is another tool {name!r}", param=f"{path}.function.name")
        shown = {key: each for key, each in value.items() if key not in _MARKS}
        tools[name] = Tool(name, json_text(shown), body.is_breakpoint)
    return tuple(tools.values())


def read_calls(values: object, path: str) -> tuple[ToolCall, ...]:
    """The calls of an assistant's message; None holds none.

    Raises:
        PromptError: one is malformed.
    """
    if values is None:
        return ()
    if not isinstance(values, list):
        raise PromptError(f"{path} must be a list", param=path, code="invalid_type")
    return tuple(_read_call(value, f"{path}[{index}]") for index, value in enumerate(values))


def _read_call(value: object, path: str) -> ToolCall:
    call = read(CallBody, value, path)
    param = f"{path}.function.arguments"
    try:
        arguments = read_object(json.loads(call.function.arguments or "{}"), param)
        text = json_text(arguments)
        text.encode()
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{param} must be the JSON text of an object", param=param) from error
    return ToolCall(call.id, call.function.name, text)
