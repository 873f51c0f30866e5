"""Replies and errors as Anthropic's Messages API writes them."""

import dataclasses
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from services.common.errors import HypicError
from services.common.telemetry import get_logger
from services.router.adapters.http_errors import HttpError, http_error
from services.router.adapters.parse import ParsedRequest
from services.router.calling import Called, CalledEvent
from services.router.domain.ports import FinishReason
from services.router.domain.tools import ToolCall
from services.router.reply import Delta, Done

__all__ = ["MessageWriter", "anthropic_envelope"]

Json = dict[str, Any]

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


def anthropic_envelope(error: HttpError, request_id: str) -> Json:
    """An error as this API's clients read it; the field's path stands in the message."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class MessageWriter:
    """One reply, whole or in events."""

    def __init__(self, reply_id: str, parsed: ParsedRequest) -> None:
        self._reply_id = reply_id
        self._parsed = parsed
        self._num_blocks = 0
        self._is_in_text = False

    async def whole(self, events: AsyncGenerator[CalledEvent]) -> Json:
        """The reply as one object."""
        blocks: list[Json] = []
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Called):
                    blocks.append(_tool_use(event.call, json.loads(event.call.arguments)))
                elif isinstance(event, Delta):
                    if not blocks or blocks[-1]["type"] != "text":
                        blocks.append({"type": "text", "text": ""})
                    blocks[-1]["text"] += event.text
                elif isinstance(event, Done):
                    return self._message(blocks) | _stop(event) | {"usage": _usage(event)} | self._explanation(event)
        raise HypicError("the reply ended without a finish")

    async def events(
        self, first: CalledEvent, events: AsyncGenerator[CalledEvent], request_id: str
    ) -> AsyncGenerator[bytes]:
        """The reply as server-sent events, begun by `first`; a failure on the way is the last one."""
        async with aclosing(events):
            try:
                nothing = {"input_tokens": 0, "output_tokens": 0}
                start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": nothing}
                yield _event({"type": "message_start", "message": start})
                for shown in self._shown(first):
                    yield _event(shown)
                async for event in events:
                    for shown in self._shown(event):
                        yield _event(shown)
            except Exception as error:
                get_logger().exception("stream_failed")
                yield _event(anthropic_envelope(http_error(error), request_id))

    def _shown(self, event: CalledEvent) -> Iterator[Json]:
        if isinstance(event, Delta):
            if not self._is_in_text:
                yield self._start({"type": "text", "text": ""})
                self._is_in_text = True
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, Called):
            yield from self._end_text()
            yield self._start(_tool_use(event.call, {}))
            yield self._delta({"type": "input_json_delta", "partial_json": event.call.arguments})
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        elif isinstance(event, Done):
            yield from self._end_text()
            yield {"type": "message_delta", "delta": _stop(event), "usage": _usage(event)} | self._explanation(event)
            yield {"type": "message_stop"}

    def _end_text(self) -> Iterator[Json]:
        if self._is_in_text:
            self._is_in_text = False
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}

    def _start(self, block: Json) -> Json:
        self._num_blocks += 1
        return {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _message(self, blocks: list[Json]) -> Json:
        head = {"id": self._reply_id, "type": "message", "role": "assistant", "model": self._parsed.request.model}
        return head | {"content": blocks}

    def _explanation(self, done: Done) -> Json:
        return {"hypic": dataclasses.asdict(done.explanation)} if self._parsed.request.options.explain else {}


def _tool_use(call: ToolCall, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": arguments}


def _stop(done: Done) -> Json:
    reason = "stop_sequence" if done.stop and done.reason is FinishReason.STOP else _REASONS[done.reason]
    return {"stop_reason": reason, "stop_sequence": done.stop or None}


def _usage(done: Done) -> Json:
    """The three kinds of prompt tokens add up to the prompt: captured for this and later requests, reused, and computed."""
    captured = sum(part.captured_tokens for part in done.explanation.parts)
    cached = done.usage.cached_tokens
    return {
        "input_tokens": done.usage.prompt_tokens - captured - cached,
        "cache_creation_input_tokens": captured,
        "cache_read_input_tokens": cached,
        "output_tokens": done.usage.completion_tokens,
    }


def _event(payload: Json) -> bytes:
    content = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return f"event: {payload['type']}\ndata: {content}\n\n".encode()
