"""From a client's JSON to a request of the domain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.router.adapters.documents import (
    LocatedDocument,
    read_document,
    read_document_part,
    refuse_conflicts,
)
from services.router.adapters.fields import read, read_object
from services.router.adapters.schema import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    HypicOptions,
    MessageBody,
    SharedBody,
    StopList,
    StopText,
    TextPart,
)
from services.router.adapters.shapes import MAX_PARTS
from services.router.adapters.tool_schema import allows_calls, read_calls, read_tools
from services.router.domain.request import (
    ChatPrompt,
    Cold,
    Content,
    GenerationRequest,
    Message,
    PromptError,
    Reuse,
    ReuseOptions,
    Role,
    Sampling,
    Text,
    TextPrompt,
)
from services.router.domain.tenancy import Caller
from services.router.domain.tools import Tool

__all__ = ["ParsedRequest", "RequestParser", "read_content", "reuse_options"]

_ROLES = {
    "system": Role.SYSTEM,
    # OpenAI's newer name of the same speaker.
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}
# OpenAI's own default of `/v1/completions`.
_COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request, and how its reply is to be written; `ignored_fields` are names that were not understood.

    `callable_tools`: those whose calls are looked for in the reply.
    """

    request: GenerationRequest
    is_stream: bool
    include_usage: bool
    ignored_fields: tuple[str, ...]
    callable_tools: tuple[Tool, ...] = ()


class RequestParser:
    """Reads bodies; `completions_separator` is empty when it is off."""

    def __init__(self, completions_separator: str) -> None:
        self._separator = completions_separator

    def parse_chat(self, body: object, caller: Caller) -> ParsedRequest:
        """A body of `/v1/chat/completions`.

        Raises:
            PromptError: it is malformed or asks for what cannot be honoured; names the field.
        """
        raw = read_object(body, "")
        chat = read(ChatBody, raw, "")
        _refuse_unsupported(raw)
        documents = [_document(each, f"documents[{i}]") for i, each in enumerate(chat.documents or [])]
        located = list(documents)
        messages = tuple(_message(each, f"messages[{i}]", located) for i, each in enumerate(chat.messages))
        refuse_conflicts(located)
        tools = read_tools(chat.tools or ())
        prompt = ChatPrompt(messages, tuple(each.document for each in documents), tools)
        parsed = _parsed(chat, prompt, chat.max_completion_tokens or chat.max_tokens, caller)
        return replace(parsed, callable_tools=tools if allows_calls(chat.tool_choice) else ())

    def parse_completion(self, body: object, caller: Caller) -> ParsedRequest:
        """A body of `/v1/completions`.

        Raises:
            PromptError: it is malformed or asks for what cannot be honoured; names the field.
        """
        raw = read_object(body, "")
        completion = read(CompletionBody, raw, "")
        _refuse_unsupported(raw)
        text = _prompt_text(completion.prompt)
        pieces = text.split(self._separator) if self._separator else [text]
        max_tokens = completion.max_tokens or _COMPLETION_MAX_TOKENS
        return _parsed(completion, TextPrompt(tuple(pieces)), max_tokens, caller)


def _parsed(body: SharedBody, prompt: ChatPrompt | TextPrompt, max_tokens: int | None, caller: Caller) -> ParsedRequest:
    request = GenerationRequest(
        model=body.model,
        prompt=prompt,
        sampling=_sampling(body, max_tokens),
        stop=_stops(body.stop),
        options=reuse_options(body.hypic),
        namespace=replace(caller.namespace(), salt=body.cache_salt or ""),
        max_in_flight=caller.quotas.max_requests_in_flight,
    )
    if body.stream_options and not body.stream:
        raise PromptError("stream_options needs stream: true", param="stream_options")
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    ignored = tuple(sorted(set(body.model_extra or {}) - set(UNSUPPORTED)))
    return ParsedRequest(request, bool(body.stream), include_usage, ignored)


def reuse_options(given: HypicOptions | None) -> ReuseOptions:
    """The client's `hypic` object, or the defaults."""
    if given is None:
        return ReuseOptions()
    return ReuseOptions(Reuse(given.reuse), Cold(given.cold), given.explain)


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name, harmless in UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(value == each and _is_bool(value) == _is_bool(each) for each in harmless):
            raise PromptError(f"{name} is not supported by this server", param=name, code="unsupported_parameter")


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _document(value: object, path: str) -> LocatedDocument:
    return LocatedDocument(path, read_document(value, path))


def _sampling(body: SharedBody, max_tokens: int | None) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        seed=None if body.seed is None else body.seed % 2**64,
        max_tokens=max_tokens,
    )


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(read(StopList, {"stop": value}, "").stop)
    return (read(StopText, {"stop": value}, "").stop,)


def _message(value: object, path: str, located: list[LocatedDocument]) -> Message:
    message = read(MessageBody, value, path)
    role = _ROLES.get(message.role)
    if role is None:
        raise PromptError(f"{path}.role must be one of {', '.join(_ROLES)}", param=f"{path}.role")
    if message.function_call:
        param = f"{path}.function_call"
        raise PromptError(f"{param} is not supported; use tool_calls", param=param, code="unsupported_parameter")
    calls = read_calls(message.tool_calls, f"{path}.tool_calls")
    if calls and role is not Role.ASSISTANT:
        raise PromptError(f"{path}.tool_calls: only an assistant calls tools", param=f"{path}.tool_calls")
    content = read_content(message.content, f"{path}.content", role, located)
    if calls and content == [Text("")]:
        content = []
    return Message(role, tuple(content), calls, message.tool_call_id or "")


def read_content(
    value: object, path: str, role: Role, located: list[LocatedDocument], beside: str = ""
) -> Sequence[Content]:
    """The content of a message: texts and documents, which are added to `located`. Parts of the kind `beside` are left out.

    Raises:
        PromptError: it is malformed.
    """
    if isinstance(value, str):
        return [Text(read(TextPart, {"text": value}, path.removesuffix(".content")).text)]
    if value is None and role is Role.ASSISTANT:
        return [Text("")]
    if not isinstance(value, list) or not value:
        raise PromptError(f"{path} must be a string or a list of parts", param=path, code="invalid_type")
    if len(value) > MAX_PARTS:
        raise PromptError(f"{path} may hold at most {MAX_PARTS} parts, not {len(value)}", param=path)
    parts = [(f"{path}[{index}]", part) for index, part in enumerate(value)]
    return [_content_part(part, where, located) for where, part in parts if not beside or part.get("type") != beside]


def _content_part(value: object, path: str, located: list[LocatedDocument]) -> Content:
    kind = read_object(value, path).get("type")
    if kind == "text":
        part = read(TextPart, value, path)
        return Text(part.text, bool(part.hypic and part.hypic.segment), part.is_breakpoint)
    if kind == "document":
        document = read_document_part(value, path)
        located.append(LocatedDocument(path, document))
        return document
    raise PromptError(f"{path}.type must be 'text' or 'document'", param=f"{path}.type", code="unsupported_content")


def _prompt_text(value: object) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if not isinstance(value, str):
        raise PromptError("prompt must be one string; token ids and several prompts are not supported", param="prompt")
    text = read(TextPart, {"text": value}, "prompt").text
    if not text:
        raise PromptError("prompt must not be empty", param="prompt")
    return text
