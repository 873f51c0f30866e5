"""Replies that are calls of tools and nothing else: the grammar that they are held to."""

import json
from collections.abc import Sequence
from typing import Any

from services.router.domain.request import Grammar, GrammarKind, PromptError
from services.router.domain.tools import Tool, json_text

__all__ = ["force_calls"]

# As templates write arguments, so that a reply reads the same when it comes back in the next turn.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_SOURCE_CHARACTERS = 1 << 16


def force_calls(tools: Sequence[Tool], is_parallel: bool) -> Grammar:
    """One call of one of these tools, or with `is_parallel` several: each a JSON object between `<tool_call>` tags, its arguments
    as the tool's schema has them. In the notation of llguidance's Lark.

    Raises:
        PromptError: the parameters of a tool are no object, or all of them are too large.
    """
    calls = [f"call_{index}: {_call(tool, index)}" for index, tool in enumerate(tools)]
    choice = " | ".join(f"call_{index}" for index in range(len(tools)))
    start = 'start: call ("\\n" call)*' if is_parallel else "start: call"
    source = "\n".join([start, f"call: {choice}", *calls])
    if len(source) > _MAX_SOURCE_CHARACTERS:
        raise PromptError(
            f"tools: forced calls need schemas of at most {_MAX_SOURCE_CHARACTERS} characters in all; offer fewer tools, or"
            " tool_choice auto",
            param="tools",
        )
    return Grammar(GrammarKind.GRAMMAR, source, "tools")


def _call(tool: Tool, index: int) -> str:
    opening = json.dumps(f'<tool_call>\n{{"name": "{tool.name}", "arguments": ')
    closing = json.dumps("}\n</tool_call>")
    return f"{opening} %json {json_text(_arguments(tool, index))} {closing}"


def _arguments(tool: Tool, index: int) -> dict[str, Any]:
    schema = tool.parameters()
    if schema.get("type", "object") != "object":
        path = f"tools[{index}].function.parameters.type"
        raise PromptError(f"{path} must be object for forced calls, since arguments are one", param=path)
    return {**schema, "type": "object", "x-guidance": _LAYOUT}
