"""Replies as OpenAI's endpoints write them."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.router.adapters.parse import ParsedRequest
from services.router.calling import Called
from services.router.domain.tools import ToolCall
from services.router.reply import Done

__all__ = ["ChatFormat", "CompletionFormat", "ReplyFormat", "ReplyHead"]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every object of one reply repeats; `created` is a Unix time."""

    reply_id: str
    created: int
    model: str


class ReplyFormat(Protocol):
    """How one endpoint writes a reply, whole or in chunks."""

    def whole(self, text: str, calls: Sequence[ToolCall], done: Done) -> Json:
        """The reply as one object."""
        ...

    def opening(self) -> Iterator[Json]:
        """Chunks that come before any text."""
        ...

    def delta(self, text: str) -> Json:
        """A chunk of text."""
        ...

    def called(self, event: Called) -> Json:
        """A chunk with a call of a tool."""
        ...

    def closing(self, done: Done) -> Iterator[Json]:
        """The chunk with the finish reason, and the usage chunk when it was asked for."""
        ...


class _Format:
    """What both endpoints share."""

    def __init__(self, head: ReplyHead, parsed: ParsedRequest, whole_object: str, chunk_object: str) -> None:
        self._head: Json = {"id": head.reply_id, "created": head.created, "model": head.model}
        self._parsed = parsed
        self._whole_object = whole_object
        self._chunk_object = chunk_object

    def _whole(self, choice: Json, done: Done) -> Json:
        choice = {"index": 0, "logprobs": None, "finish_reason": done.reason.value} | choice
        reply = self._head | {"object": self._whole_object, "choices": [choice], "usage": _usage(done)}
        return reply | self._explanation(done)

    def _chunk(self, choice: Json, finish_reason: str | None) -> Json:
        choice = {"index": 0, "logprobs": None, "finish_reason": finish_reason} | choice
        chunk = self._head | {"object": self._chunk_object, "choices": [choice]}
        return chunk | {"usage": None} if self._parsed.include_usage else chunk

    def _closing(self, choice: Json, done: Done) -> Iterator[Json]:
        last = self._chunk(choice, done.reason.value)
        if self._parsed.include_usage:
            yield last
            last = self._head | {"object": self._chunk_object, "choices": [], "usage": _usage(done)}
        yield last | self._explanation(done)

    def _explanation(self, done: Done) -> Json:
        if not self._parsed.request.options.explain:
            return {}
        return {"hypic": dataclasses.asdict(done.explanation)}


class ChatFormat(_Format):
    """`/v1/chat/completions`."""

    def __init__(self, head: ReplyHead, parsed: ParsedRequest) -> None:
        super().__init__(head, parsed, "chat.completion", "chat.completion.chunk")

    def whole(self, text: str, calls: Sequence[ToolCall], done: Done) -> Json:
        """See `ReplyFormat`."""
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [_call(call) for call in calls]}
        return self._whole({"message": message}, done)

    def opening(self) -> Iterator[Json]:
        """See `ReplyFormat`."""
        yield self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def delta(self, text: str) -> Json:
        """See `ReplyFormat`."""
        return self._chunk({"delta": {"content": text}}, None)

    def called(self, event: Called) -> Json:
        """See `ReplyFormat`."""
        return self._chunk({"delta": {"tool_calls": [{"index": event.index} | _call(event.call)]}}, None)

    def closing(self, done: Done) -> Iterator[Json]:
        """See `ReplyFormat`."""
        return self._closing({"delta": {}}, done)


class CompletionFormat(_Format):
    """`/v1/completions`."""

    def __init__(self, head: ReplyHead, parsed: ParsedRequest) -> None:
        super().__init__(head, parsed, "text_completion", "text_completion")

    def whole(self, text: str, calls: Sequence[ToolCall], done: Done) -> Json:
        """See `ReplyFormat`."""
        return self._whole({"text": text}, done)

    def opening(self) -> Iterator[Json]:
        """See `ReplyFormat`."""
        return iter(())

    def delta(self, text: str) -> Json:
        """See `ReplyFormat`."""
        return self._chunk({"text": text}, None)

    def called(self, event: Called) -> Json:
        """Tools are offered in chats alone."""
        raise NotImplementedError

    def closing(self, done: Done) -> Iterator[Json]:
        """See `ReplyFormat`."""
        return self._closing({"text": ""}, done)


def _call(call: ToolCall) -> Json:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(done: Done) -> Json:
    usage = done.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
