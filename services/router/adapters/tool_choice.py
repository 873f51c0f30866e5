"""Which of its tools a request lets the model call, or makes it call."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.router.adapters.fields import read, read_object
from services.router.adapters.tool_schema import NamedChoiceBody
from services.router.domain.forced_calls import force_calls
from services.router.domain.request import Grammar, PromptError
from services.router.domain.tools import Tool

__all__ = ["NO_TOOLS", "ToolChoice", "any_tool", "one_tool", "read_choice"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """callable: tools whose calls are looked for in the reply; forced: what the reply is held to, None where the model is free;
    is_named: the client has named the function, so that the reply ends for no call of the model's own choice.
    """

    callable: tuple[Tool, ...] = ()
    forced: Grammar | None = None
    is_named: bool = False


NO_TOOLS = ToolChoice()


def read_choice(value: object, tools: Sequence[Tool], is_parallel: bool) -> ToolChoice:
    """`tool_choice` and `parallel_tool_calls` as OpenAI's clients send them.

    Raises:
        PromptError: the choice is none, there is no such tool, or the model is free in how many tools it calls.
    """
    if isinstance(value, dict):
        name = read(NamedChoiceBody, read_object(value, "tool_choice"), "tool_choice").function.name
        return one_tool(tools, name, "tool_choice.function.name")
    if value == "required":
        return any_tool(tools, is_parallel)
    if value not in (None, "auto", "none"):
        raise PromptError("tool_choice must be 'none', 'auto', 'required' or a function", param="tool_choice")
    if not is_parallel and tools and value != "none":
        raise PromptError(
            "parallel_tool_calls: a free choice cannot be held to one call; send tool_choice 'required' or a function with it",
            param="parallel_tool_calls",
            code="unsupported_parameter",
        )
    return NO_TOOLS if value == "none" else ToolChoice(tuple(tools))


def any_tool(tools: Sequence[Tool], is_parallel: bool) -> ToolChoice:
    """The reply is a call of some tool, or several.

    Raises:
        PromptError: there is none, or what `force_calls` says.
    """
    if not tools:
        raise PromptError("tool_choice: there are no tools to call; send tools", param="tool_choice")
    return ToolChoice(tuple(tools), force_calls(tools, is_parallel))


def one_tool(tools: Sequence[Tool], name: str, param: str) -> ToolChoice:
    """The reply is one call of a tool.

    Raises:
        PromptError: it is not offered, or what `force_calls` says.
    """
    found = tuple(tool for tool in tools if tool.name == name)
    if not found:
        raise PromptError(f"{param}: there is no tool {name!r} among tools", param=param)
    return ToolChoice(found, force_calls(found, is_parallel=False), is_named=True)
