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
from services.router.adapters.grammars import read_grammar
from services.router.adapters.schema import (
    ChatBody,
    CompletionBody,
    HypicOptions,
    MessageBody,
    SharedBody,
    StopList,
    StopText,
    TextPart,
)
from services.router.adapters.shapes import MAX_PROMPTS
from services.router.adapters.tool_choice import NO_TOOLS, ToolChoice, read_choice
from services.router.adapters.tool_schema import read_calls, read_tools
from services.router.adapters.unsupported import REMEDIES, UNSUPPORTED
from services.router.domain.request import (
    ChatPrompt,
    Cold,
    Content,
    GenerationRequest,
    Grammar,
    Message,
    PromptError,
    Refresh,
    Reuse,
    ReuseOptions,
    Role,
    Sampling,
    Text,
    TextPrompt,
)
from services.router.domain.tenancy import Caller

__all__ = ["ParsedRequest", "RequestParser", "check_parts", "read_content", "reuse_options"]

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

    `tools`: whose calls are looked for in the reply, and whether it must be one.
    """

    request: GenerationRequest
    is_stream: bool
    include_usage: bool
    ignored_fields: tuple[str, ...]
    tools: ToolChoice = NO_TOOLS


class RequestParser:
    """Reads bodies; `completions_separator` is empty when it is off. max_parts: messages, documents and content parts of one."""

    def __init__(self, completions_separator: str, max_parts: int = 4096) -> None:
        self._separator = completions_separator
        self._max_parts = max_parts

    def parse_chat(self, body: object, caller: Caller) -> ParsedRequest:
        """A body of `/v1/chat/completions`.

        Raises:
            PromptError: it is malformed or asks for what cannot be honoured; names the field.
        """
        raw = read_object(body, "")
        chat = read(ChatBody, raw, "")
        _refuse_unsupported(raw)
        check_parts(chat.messages, chat.documents or (), self._max_parts)
        documents = [_document(each, f"documents[{i}]") for i, each in enumerate(chat.documents or [])]
        located = list(documents)
        messages = tuple(_message(each, f"messages[{i}]", located) for i, each in enumerate(chat.messages))
        refuse_conflicts(located)
        tools = read_tools(chat.tools or ())
        prompt = ChatPrompt(messages, tuple(each.document for each in documents), tools)
        choice = read_choice(chat.tool_choice, tools, chat.parallel_tool_calls is not False)
        sampling = _sampling(chat, chat.max_completion_tokens or chat.max_tokens, choice.forced)
        parsed = _parsed(chat, prompt, replace(sampling, logprobs=_chat_logprobs(chat)), caller)
        return replace(parsed, tools=choice)

    def parse_completion(self, body: object, caller: Caller) -> ParsedRequest:
        """A body of `/v1/completions`.

        Raises:
            PromptError: it is malformed or asks for what cannot be honoured; names the field.
        """
        raw = read_object(body, "")
        completion = read(CompletionBody, raw, "")
        _refuse_unsupported(raw)
        first, *further = map(self._prompt, _prompt_texts(completion.prompt))
        sampling = _sampling(completion, completion.max_tokens or _COMPLETION_MAX_TOKENS)
        sampling = replace(sampling, logprobs=completion.logprobs)
        parsed = _parsed(completion, first, sampling, caller)
        return replace(parsed, request=replace(parsed.request, further_prompts=tuple(further)))

    def _prompt(self, text: str) -> TextPrompt:
        return TextPrompt(tuple(text.split(self._separator) if self._separator else [text]))


def _parsed(body: SharedBody, prompt: ChatPrompt | TextPrompt, sampling: Sampling, caller: Caller) -> ParsedRequest:
    request = GenerationRequest(
        model=body.model,
        prompt=prompt,
        sampling=sampling,
        stop=_stops(body.stop),
        options=reuse_options(body.hypic),
        namespace=replace(caller.namespace(), salt=body.cache_salt or ""),
        max_in_flight=caller.quotas.max_requests_in_flight,
        rates=caller.quotas.rates,
        priority=max(body.priority or 0, caller.quotas.min_priority),
        num_choices=body.n or 1,
    )
    if body.stream_options and not body.stream:
        raise PromptError("stream_options needs stream: true", param="stream_options")
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    ignored = tuple(sorted(set(body.model_extra or {}) - set(UNSUPPORTED)))
    return ParsedRequest(request, bool(body.stream), include_usage, ignored)


def check_parts(messages: Sequence[Any], documents: Sequence[Any], most: int) -> None:
    """Refuse a prompt of more messages, documents and content parts together, ahead of looking at each of them.

    Raises:
        PromptError: it has more.
    """
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    found = len(messages) + len(documents) + sum(len(each) for each in contents if isinstance(each, list))
    if found > most:
        raise PromptError(
            f"the request has {found} messages, documents and content parts; this server takes {most}",
            param="documents" if len(documents) > most // 2 else "messages",
            code="too_many_parts",
        )


def reuse_options(given: HypicOptions | None) -> ReuseOptions:
    """The client's `hypic` object, or the defaults."""
    if given is None:
        return ReuseOptions()
    return ReuseOptions(
        reuse=Reuse(given.reuse),
        cold=None if given.cold is None else Cold(given.cold),
        explain=given.explain,
        refresh=None if given.refresh is None else Refresh(None if given.refresh == "auto" else given.refresh),
        ttft_budget_seconds=given.ttft_budget_seconds,
        tag=given.tag or "",
    )


def _refuse_unsupported(body: Mapping[str, Any]) -> None:
    for name, harmless in UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(value == each and _is_bool(value) == _is_bool(each) for each in harmless):
            remedy = REMEDIES.get(name, "leave it out")
            message = f"{name} is not supported by this server; {remedy}"
            raise PromptError(message, param=name, code="unsupported_parameter")


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _document(value: object, path: str) -> LocatedDocument:
    return LocatedDocument(path, read_document(value, path))


def _sampling(body: SharedBody, max_tokens: int | None, forced: Grammar | None = None) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        seed=None if body.seed is None else body.seed % 2**64,
        max_tokens=max_tokens,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        grammar=read_grammar(body, forced),
    )


def _logit_bias(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and name == str(int(name[:10]))):
            raise PromptError(f"logit_bias: {name[:40]!r} is no token id", param="logit_bias")
    return tuple((int(name), bias) for name, bias in biases.items())


def _chat_logprobs(chat: ChatBody) -> int | None:
    if chat.top_logprobs and not chat.logprobs:
        raise PromptError("top_logprobs needs logprobs: true", param="top_logprobs")
    return (chat.top_logprobs or 0) if chat.logprobs else None


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


def _prompt_texts(value: object) -> Sequence[str]:
    if not isinstance(value, list):
        return [_prompt_text(value, "prompt")]
    if not 1 <= len(value) <= MAX_PROMPTS or not all(isinstance(each, str) for each in value):
        raise PromptError(
            f"prompt must be a string or a list of 1 to {MAX_PROMPTS} strings; token ids are not supported",
            param="prompt",
        )
    return [_prompt_text(each, f"prompt[{index}]") for index, each in enumerate(value)]


def _prompt_text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise PromptError("prompt must be a string or a list of strings; token ids are not supported", param=path)
    text = read(TextPart, {"text": value}, path).text
    if not text:
        raise PromptError(f"{path} must not be empty", param=path)
    return text
