"""Requests as the API takes them, in one of the modes that are compared. The token ids are the same in all of them."""

from enum import StrEnum
from typing import Any, Protocol

from bench.traffic.stream import Piece, TrafficRequest, Turn

__all__ = ["Mode", "Writer", "body_of"]

_BREAKPOINT = {"cache_control": {"type": "ephemeral"}}
# Anthropic's bound on breakpoints of a request is 4; more would not be asked for by any client.
_DOCUMENT_BREAKPOINTS = 3


class Mode(StrEnum):
    """What may be reused."""

    OFF = "off"
    EXACT = "exact"
    COMPOSE = "compose"


class Writer(Protocol):
    """Gives pieces their text."""

    def text(self, piece: Piece) -> str:
        """The same for the same piece."""
        ...


def body_of(request: TrafficRequest, mode: Mode, writer: Writer, model: str, salt: str) -> dict[str, Any]:
    """A streamed chat with greedy decoding of exactly as many tokens as the workload says.

    An exact cache is told where prompts may part: behind the runs of the system prompt, and behind a question's first
    documents and its last one. Composing needs that behind the system prompt alone.
    """
    return {
        "model": model,
        "messages": [*_system(request, mode, writer), *_turns(request, mode, writer)],
        "max_tokens": request.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
        "hypic": {"reuse": mode.value, "explain": True},
    }


def _system(request: TrafficRequest, mode: Mode, writer: Writer) -> list[dict[str, Any]]:
    if not request.system:
        return []
    marks = {} if mode is Mode.OFF else _BREAKPOINT
    last = len(request.system) - 1
    # A snapshot stands at the end of the message anyway.
    parts = [
        {"type": "text", "text": writer.text(piece) + "\n"} | (marks if index < last else {})
        for index, piece in enumerate(request.system)
    ]
    return [{"role": "system", "content": parts}]


def _turns(request: TrafficRequest, mode: Mode, writer: Writer) -> list[dict[str, Any]]:
    *earlier, last = request.turns
    messages: list[dict[str, Any]] = []
    for turn in earlier:
        messages.append({"role": "user", "content": _content(turn, mode, writer)})
        messages.append({"role": "assistant", "content": writer.text(turn.reply)})
    return [*messages, {"role": "user", "content": _content(last, mode, writer)}]


def _content(turn: Turn, mode: Mode, writer: Writer) -> list[dict[str, Any]]:
    count = len(turn.documents)
    marked = {*range(min(_DOCUMENT_BREAKPOINTS - 1, count)), count - 1} if mode is Mode.EXACT else set()
    parts = [
        {"type": "document", "id": piece.name, "text": writer.text(piece)} | (_BREAKPOINT if index in marked else {})
        for index, piece in enumerate(turn.documents)
    ]
    return [*parts, {"type": "text", "text": writer.text(turn.question)}]
