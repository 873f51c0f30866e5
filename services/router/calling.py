"""Tool calls in a reply, beside its text."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from services.router.domain.ports import FinishReason
from services.router.domain.tool_calls import ToolCallParser
from services.router.domain.tools import Tool, ToolCall
from services.router.reply import Delta, Done, ReplyEvent

__all__ = ["Called", "CalledEvent", "find_calls"]


@dataclass(frozen=True, slots=True)
class Called:
    """A call that is complete; `index` counts the reply's calls."""

    call: ToolCall
    index: int


CalledEvent = ReplyEvent | Called


async def find_calls(events: AsyncGenerator[ReplyEvent], tools: Sequence[Tool]) -> AsyncGenerator[CalledEvent]:
    """The reply with calls of these tools taken out of its text. A reply that stops by itself with calls ends for them."""
    finder = _Finder(tools) if tools else None
    async with aclosing(events):
        async for event in events:
            if finder is None:
                yield event
                continue
            for found in finder.take(event):
                yield found


class _Finder:
    """The calls of one reply."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._parser = ToolCallParser(tools)
        self._num_calls = 0

    def take(self, event: ReplyEvent) -> Iterator[CalledEvent]:
        """What the client is to see of this event."""
        if isinstance(event, Delta):
            yield from self._found(self._parser.push(event.text))
        elif isinstance(event, Done):
            yield from self._found(self._parser.flush())
            is_call = self._num_calls and event.reason is FinishReason.STOP
            yield replace(event, reason=FinishReason.TOOL_CALLS) if is_call else event
        else:
            yield event

    def _found(self, pieces: Iterable[str | ToolCall]) -> Iterator[CalledEvent]:
        for piece in pieces:
            if isinstance(piece, str):
                yield Delta(piece)
            else:
                yield Called(piece, self._num_calls)
                self._num_calls += 1
