"""Tool calls in a reply, beside its text."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from services.router.domain.ports import FinishReason
from services.router.domain.shown_tokens import ShownToken
from services.router.domain.tool_calls import ToolCallParser
from services.router.domain.tools import Tool, ToolCall
from services.router.reply import Delta, Done, ReplyEvent, Started

__all__ = ["Called", "CalledEvent", "with_calls"]


@dataclass(frozen=True, slots=True)
class Called:
    """A call that is complete; `index` counts the calls of its choice."""

    call: ToolCall
    index: int
    choice: int = 0


CalledEvent = ReplyEvent | Called


def with_calls(
    events: AsyncGenerator[ReplyEvent], tools: Sequence[Tool], ends_for_calls: bool = True
) -> AsyncGenerator[CalledEvent]:
    """The reply with calls of these tools taken out of its text.

    ends_for_calls: a choice that stops by itself with calls says that it ends for them.
    """
    return _find_calls(events, tools, ends_for_calls) if tools else events


async def _find_calls(
    events: AsyncGenerator[ReplyEvent], tools: Sequence[Tool], ends_for_calls: bool
) -> AsyncGenerator[CalledEvent]:
    finders: dict[int, _Finder] = {}
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Started):
                yield event
                continue
            if event.choice not in finders:
                finders[event.choice] = _Finder(tools, event.choice, ends_for_calls)
            for found in finders[event.choice].take(event):
                yield found


class _Finder:
    """The calls of one choice. Tokens whose log probabilities were asked for go with the text that is shown next."""

    def __init__(self, tools: Sequence[Tool], choice: int, ends_for_calls: bool) -> None:
        self._parser = ToolCallParser(tools)
        self._ends_for_calls = ends_for_calls
        self._choice = choice
        self._tokens: tuple[ShownToken, ...] = ()
        self._num_calls = 0

    def take(self, event: Delta | Done) -> Iterator[CalledEvent]:
        """What the client is to see of this event."""
        if isinstance(event, Delta):
            self._tokens += event.tokens
            yield from self._found(self._parser.push(event.text))
            return
        yield from self._found(self._parser.flush())
        if self._tokens:
            yield self._delta("")
        is_call = self._ends_for_calls and self._num_calls and event.reason is FinishReason.STOP
        yield replace(event, reason=FinishReason.TOOL_CALLS) if is_call else event

    def _found(self, pieces: Iterable[str | ToolCall]) -> Iterator[CalledEvent]:
        for piece in pieces:
            if isinstance(piece, str):
                yield self._delta(piece)
            else:
                yield Called(piece, self._num_calls, self._choice)
                self._num_calls += 1

    def _delta(self, text: str) -> Delta:
        tokens, self._tokens = self._tokens, ()
        return Delta(text, tokens, self._choice)
