"""Replies as OpenAI's endpoints write them."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.router.adapters.logprob_formats import chat_logprobs, completion_logprobs
from services.router.adapters.parse import ParsedRequest
from services.router.calling import Called
from services.router.domain.shown_tokens import ShownToken
from services.router.domain.tools import ToolCall
from services.router.reply import Delta, Done

__all__ = ["ChatFormat", "CompletionFormat", "ReplyFormat", "ReplyHead", "WholeChoice"]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every object of one reply repeats; `created` is a Unix time."""

    reply_id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """One choice of a reply that has ended."""

    text: str
    tokens: tuple[ShownToken, ...]
    calls: tuple[ToolCall, ...]
    done: Done


class ReplyFormat(Protocol):
    """How one endpoint writes a reply, whole or in chunks."""

    def whole(self, choices: Sequence[WholeChoice]) -> Json:
        """The reply as one object; choices in their order."""
        ...

    def opening(self) -> Iterator[Json]:
        """Chunks that come before any text."""
        ...

    def delta(self, delta: Delta) -> Json:
        """A chunk of text."""
        ...

    def called(self, event: Called) -> Json:
        """A chunk with a call of a tool."""
        ...

    def closing(self, done: Done) -> Iterator[Json]:
        """The chunk with a choice's finish reason."""
        ...

    def ending(self, ends: Sequence[Done]) -> Iterator[Json]:
        """Chunks behind all choices, which are given in their order: the usage where it was asked for."""
        ...


class _Format:
    """What both endpoints share."""

    def __init__(self, head: ReplyHead, parsed: ParsedRequest, whole_object: str, chunk_object: str) -> None:
        self._head: Json = {"id": head.reply_id, "created": head.created, "model": head.model}
        self._parsed = parsed
        self._whole_object = whole_object
        self._chunk_object = chunk_object

    def _whole(self, choices: Sequence[Json], ends: Sequence[Done]) -> Json:
        rows = [
            {"index": done.choice, "logprobs": None, "finish_reason": done.reason.value} | choice
            for choice, done in zip(choices, ends, strict=True)
        ]
        reply = self._head | {"object": self._whole_object, "choices": rows, "usage": self._usage(ends)}
        return reply | self._explanation(ends[0])

    def _chunk(self, index: int, choice: Json, finish_reason: str | None) -> Json:
        choice = {"index": index, "logprobs": None, "finish_reason": finish_reason} | choice
        chunk = self._head | {"object": self._chunk_object, "choices": [choice]}
        return chunk | {"usage": None} if self._parsed.include_usage else chunk

    def _closing(self, choice: Json, done: Done) -> Iterator[Json]:
        last = self._chunk(done.choice, choice, done.reason.value)
        yield last if self._parsed.include_usage else last | self._explanation(done)

    def ending(self, ends: Sequence[Done]) -> Iterator[Json]:
        """See `ReplyFormat`."""
        if self._parsed.include_usage:
            last = self._head | {"object": self._chunk_object, "choices": [], "usage": self._usage(ends)}
            yield last | self._explanation(ends[0])

    def _explanation(self, done: Done) -> Json:
        if not self._parsed.request.options.explain:
            return {}
        return {"hypic": dataclasses.asdict(done.explanation)}

    def _usage(self, ends: Sequence[Done]) -> Json:
        """A prompt counts once, however many choices it has."""
        prompts = [done.usage for done in ends if done.choice % self._parsed.request.num_choices == 0]
        prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
        completion_tokens = sum(done.usage.completion_tokens for done in ends)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        }


class ChatFormat(_Format):
    """`/v1/chat/completions`."""

    def __init__(self, head: ReplyHead, parsed: ParsedRequest) -> None:
        super().__init__(head, parsed, "chat.completion", "chat.completion.chunk")

    def whole(self, choices: Sequence[WholeChoice]) -> Json:
        """See `ReplyFormat`."""
        rows = [{"message": _message(each)} | self._logprobs(each.tokens) for each in choices]
        return self._whole(rows, [each.done for each in choices])

    def opening(self) -> Iterator[Json]:
        """See `ReplyFormat`."""
        for index in range(self._parsed.request.num_replies):
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def delta(self, delta: Delta) -> Json:
        """See `ReplyFormat`."""
        return self._chunk(delta.choice, {"delta": {"content": delta.text}} | self._logprobs(delta.tokens), None)

    def called(self, event: Called) -> Json:
        """See `ReplyFormat`."""
        call = {"index": event.index} | _call(event.call)
        return self._chunk(event.choice, {"delta": {"tool_calls": [call]}}, None)

    def closing(self, done: Done) -> Iterator[Json]:
        """See `ReplyFormat`."""
        return self._closing({"delta": {}}, done)

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json:
        num_top = self._parsed.request.sampling.logprobs
        return {} if num_top is None else {"logprobs": chat_logprobs(tokens)}


class CompletionFormat(_Format):
    """`/v1/completions`."""

    def __init__(self, head: ReplyHead, parsed: ParsedRequest) -> None:
        super().__init__(head, parsed, "text_completion", "text_completion")

    def whole(self, choices: Sequence[WholeChoice]) -> Json:
        """See `ReplyFormat`."""
        rows = [{"text": each.text} | self._logprobs(each.tokens) for each in choices]
        return self._whole(rows, [each.done for each in choices])

    def opening(self) -> Iterator[Json]:
        """See `ReplyFormat`."""
        return iter(())

    def delta(self, delta: Delta) -> Json:
        """See `ReplyFormat`."""
        return self._chunk(delta.choice, {"text": delta.text} | self._logprobs(delta.tokens), None)

    def called(self, event: Called) -> Json:
        """Tools are offered in chats alone."""
        raise NotImplementedError

    def closing(self, done: Done) -> Iterator[Json]:
        """See `ReplyFormat`."""
        return self._closing({"text": ""}, done)

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json:
        num_top = self._parsed.request.sampling.logprobs
        return {} if num_top is None else {"logprobs": completion_logprobs(tokens)}


def _message(choice: WholeChoice) -> Json:
    message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message |= {"content": choice.text or None, "tool_calls": [_call(call) for call in choice.calls]}
    return message


def _call(call: ToolCall) -> Json:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
