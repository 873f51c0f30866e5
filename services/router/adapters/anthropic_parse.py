"""From Anthropic's JSON to a request of the domain."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from services.router.adapters.anthropic_schema import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    CountBody,
    MessagesBody,
    ToolResultBlock,
    ToolUseBlock,
)
from services.router.adapters.documents import LocatedDocument, refuse_conflicts
from services.router.adapters.fields import read, read_object
from services.router.adapters.parse import ParsedRequest, check_parts, read_content, reuse_options
from services.router.adapters.tool_choice import NO_TOOLS, ToolChoice, any_tool, one_tool
from services.router.adapters.tool_schema import read_tools
from services.router.domain.request import (
    ChatPrompt,
    Content,
    GenerationRequest,
    Message,
    PromptError,
    Role,
    Sampling,
    Text,
)
from services.router.domain.tenancy import Caller
from services.router.domain.tools import Tool, ToolCall, json_text

__all__ = ["parse_messages", "parse_prompt"]


def parse_messages(body: object, caller: Caller, max_parts: int) -> ParsedRequest:
    """A body of `/v1/messages`.

    Raises:
        PromptError: it is malformed or asks for what cannot be honoured; names the field.
    """
    asked = read(MessagesBody, read_object(body, ""), "")
    prompt = _prompt(asked, max_parts)
    choice = _choice(asked.tool_choice, prompt.tools)
    request = GenerationRequest(
        model=asked.model,
        prompt=prompt,
        sampling=Sampling(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=asked.top_k or 0,
            max_tokens=asked.max_tokens,
            grammar=choice.forced,
        ),
        stop=tuple(asked.stop_sequences or ()),
        options=reuse_options(asked.hypic),
        namespace=replace(caller.namespace(), salt=asked.cache_salt or ""),
        max_in_flight=caller.quotas.max_requests_in_flight,
        rates=caller.quotas.rates,
    )
    ignored = tuple(sorted(asked.model_extra or {}))
    return ParsedRequest(request, bool(asked.stream), True, ignored, choice)


def parse_prompt(body: object, max_parts: int) -> tuple[str, ChatPrompt]:
    """A body of `/v1/messages/count_tokens`: the model and the prompt.

    Raises:
        PromptError: it is malformed; names the field.
    """
    asked = read(CountBody, read_object(body, ""), "")
    return asked.model, _prompt(asked, max_parts)


def _choice(asked: AnthropicToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    """A choice that can be made of these tools.

    Raises:
        PromptError: it cannot; names the field.
    """
    kind, is_single = ("auto", False) if asked is None else (asked.type, bool(asked.disable_parallel_tool_use))
    if asked is not None and (asked.name is not None) is not (kind == "tool"):
        raise PromptError("tool_choice.name: stands with the type tool, and with no other", param="tool_choice.name")
    if asked is not None and asked.name is not None:
        return one_tool(tools, asked.name, "tool_choice.name")
    if kind == "any":
        return any_tool(tools, not is_single)
    if is_single and kind == "auto":
        param = "tool_choice.disable_parallel_tool_use"
        raise PromptError(
            f"{param}: a free choice cannot be held to one call; send the type any or tool with it", param=param
        )
    return NO_TOOLS if kind == "none" else ToolChoice(tuple(tools))


def _prompt(asked: CountBody, max_parts: int) -> ChatPrompt:
    check_parts(asked.messages, (), max_parts)
    located: list[LocatedDocument] = []
    messages: list[Message] = []
    if asked.system is not None:
        content = read_content(asked.system, "system", Role.SYSTEM, located)
        if located:
            raise PromptError("system may hold texts only", param="system", code="unsupported_content")
        messages.append(Message(Role.SYSTEM, tuple(content)))
    for index, value in enumerate(asked.messages):
        messages += _messages(value, f"messages[{index}]", located)
    refuse_conflicts(located)
    offered = [_offered(tool, f"tools[{index}]") for index, tool in enumerate(asked.tools or ())]
    return ChatPrompt(tuple(messages), tools=read_tools(offered))


def _offered(value: object, path: str) -> dict[str, Any]:
    """As OpenAI's clients send it, which is what chat templates know: the same tool is the same text."""
    tool = read(AnthropicTool, value, path)
    about = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name} | about | {"parameters": tool.input_schema}
    marked = {"cache_control": {"type": "ephemeral"}} if tool.cache_control else {}
    return {"type": "function", "function": function} | marked


def _messages(value: object, path: str, located: list[LocatedDocument]) -> Iterator[Message]:
    """Results of tools are messages of their own, ahead of what the user says beside them."""
    message = read(AnthropicMessage, value, path)
    path = f"{path}.content"
    role = Role(message.role)
    blocks = message.content
    if not isinstance(blocks, list):
        yield Message(role, tuple(read_content(blocks, path, role, located)))
        return
    kinds = [read_object(block, f"{path}[{index}]").get("type") for index, block in enumerate(blocks)]
    own = "tool_use" if role is Role.ASSISTANT else "tool_result"
    has_content = not kinds or any(kind != own for kind in kinds)
    content = read_content(blocks, path, role, located, beside=own) if has_content else []
    special = [(f"{path}[{index}]", block) for index, block in enumerate(blocks) if kinds[index] == own]
    if role is Role.ASSISTANT:
        yield Message(role, tuple(content), tuple(_call(block, where) for where, block in special))
        return
    for where, block in special:
        yield _result(block, where, located)
    if content:
        yield Message(role, tuple(content))


def _call(value: object, path: str) -> ToolCall:
    block = read(ToolUseBlock, value, path)
    return ToolCall(block.id, block.name, json_text(block.input))


def _result(value: object, path: str, located: list[LocatedDocument]) -> Message:
    block = read(ToolResultBlock, value, path)
    content: list[Content] = [Text("")]
    if block.content is not None:
        content = list(read_content(block.content, f"{path}.content", Role.TOOL, located))
    if block.cache_control:
        content[-1] = replace(content[-1], is_breakpoint=True)
    return Message(Role.TOOL, tuple(content), answers=block.tool_use_id)
