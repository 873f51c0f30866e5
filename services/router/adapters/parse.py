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
    REMEDIES,
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    MessageBody,
    SharedBody,
    StopList,
    StopText,
    TextPart,
)
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

__all__ = ["ParsedRequest", "RequestParser"]

_ROLES = {
    "system": Role.SYSTEM,
    # OpenAI's newer name of the same speaker.
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
# OpenAI's own default of `/v1/completions`.
_COMPLETION_MAX_TOKENS = 16
_MOST_PROMPTS = 32


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request, and how its reply is to be written; `ignored_fields` are names that were not understood."""

    request: GenerationRequest
    is_stream: bool
    include_usage: bool
    ignored_fields: tuple[str, ...]


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
        self._check_parts(chat)
        documents = [_document(each, f"documents[{i}]") for i, each in enumerate(chat.documents or [])]
        located = list(documents)
        messages = tuple(_message(each, f"messages[{i}]", located) for i, each in enumerate(chat.messages))
        refuse_conflicts(located)
        prompt = ChatPrompt(messages, tuple(each.document for each in documents))
        sampling = _sampling(chat, chat.max_completion_tokens or chat.max_tokens)
        return _parsed(chat, prompt, replace(sampling, logprobs=_chat_logprobs(chat)), caller)

    def _check_parts(self, chat: ChatBody) -> None:
        """Ahead of looking at each of them."""
        contents = [each.get("content") for each in chat.messages if isinstance(each, dict)]
        found = len(chat.messages) + len(chat.documents or [])
        found += sum(len(each) for each in contents if isinstance(each, list))
        if found > self._max_parts:
            param = "documents" if len(chat.documents or []) > self._max_parts // 2 else "messages"
            raise PromptError(
                f"the request has {found} messages, documents and content parts; this server takes {self._max_parts}",
                param=param,
                code="too_many_parts",
            )

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
    options = body.hypic.model_dump() if body.hypic else {}
    request = GenerationRequest(
        model=body.model,
        prompt=prompt,
        sampling=sampling,
        stop=_stops(body.stop),
        options=ReuseOptions(
            Reuse(options.get("reuse", Reuse.COMPOSE)),
            Cold(options.get("cold", Cold.PARALLEL)),
            options.get("explain", False),
        ),
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


def _sampling(body: SharedBody, max_tokens: int | None) -> Sampling:
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
        grammar=read_grammar(body),
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
        raise PromptError(
            f"{path}.role must be one of {', '.join(_ROLES)}; tools are not supported", param=f"{path}.role"
        )
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise PromptError(f"{path}.{name} is not supported", param=f"{path}.{name}", code="unsupported_parameter")
    return Message(role, tuple(_content(message.content, f"{path}.content", role, located)))


def _content(value: object, path: str, role: Role, located: list[LocatedDocument]) -> Sequence[Content]:
    if isinstance(value, str):
        return [Text(read(TextPart, {"text": value}, path.removesuffix(".content")).text)]
    if value is None and role is Role.ASSISTANT:
        return [Text("")]
    if not isinstance(value, list) or not value:
        raise PromptError(f"{path} must be a string or a list of parts", param=path, code="invalid_type")
    return [_content_part(part, f"{path}[{index}]", located) for index, part in enumerate(value)]


def _content_part(value: object, path: str, located: list[LocatedDocument]) -> Content:
    kind = read_object(value, path).get("type")
    if kind == "text":
        part = read(TextPart, value, path)
        return Text(part.text, bool(part.hypic and part.hypic.segment))
    if kind == "document":
        document = read_document_part(value, path)
        located.append(LocatedDocument(path, document))
        return document
    raise PromptError(f"{path}.type must be 'text' or 'document'", param=f"{path}.type", code="unsupported_content")


def _prompt_texts(value: object) -> Sequence[str]:
    if not isinstance(value, list):
        return [_prompt_text(value, "prompt")]
    if not 1 <= len(value) <= _MOST_PROMPTS or not all(isinstance(each, str) for each in value):
        raise PromptError(
            f"prompt must be a string or a list of 1 to {_MOST_PROMPTS} strings; token ids are not supported",
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
