"""Calls are found in each choice by itself, and no token's log probability is lost."""

from collections.abc import AsyncGenerator, Sequence

from services.router.calling import Called, CalledEvent, with_calls
from services.router.domain.explain import Explanation, PlacingExplanation, Seconds, Usage
from services.router.domain.ports import FinishReason
from services.router.domain.shown_tokens import ShownToken
from services.router.domain.tools import Tool
from services.router.reply import Delta, Done, ReplyEvent, Started

TOOLS = (Tool("now", '{"type": "function", "function": {"name": "now"}}'),)
SECONDS = Seconds(*[0.0] * len(Seconds.__dataclass_fields__))
PLACING = PlacingExplanation("w", 0.0, 0.0, 0.0)
CALL = ["<tool_", 'call>{"name": "now"}', "</tool_call>", " \n"]


def done(choice: int, reason: FinishReason = FinishReason.STOP) -> Done:
    return Done(reason, Usage(1, 1, 0), Explanation("off", "live", (), SECONDS, PLACING), choice)


def delta(text: str, choice: int, number: int) -> Delta:
    return Delta(text, (ShownToken(str(number).encode(), -1.0, (), number),), choice)


async def collect(events: Sequence[ReplyEvent], tools: Sequence[Tool] = TOOLS) -> list[CalledEvent]:
    async def given() -> AsyncGenerator[ReplyEvent]:
        for event in events:
            yield event

    return [event async for event in with_calls(given(), tools)]


async def test_choices_do_not_mix_and_tokens_stay() -> None:
    mixed = [each for n, text in enumerate(CALL) for each in (delta(text, 0, n), delta("word ", 1, 10 + n))]
    found = await collect([Started(), *mixed, done(0), done(1)])
    assert found[0] == Started()
    (call,) = [event for event in found if isinstance(event, Called)]
    assert (call.choice, call.index, call.call.name, call.call.arguments) == (0, 0, "now", "{}")
    tokens = {
        choice: [
            token.offset
            for event in found
            if isinstance(event, Delta) and event.choice == choice
            for token in event.tokens
        ]
        for choice in (0, 1)
    }
    assert tokens == {0: [0, 1, 2, 3], 1: [10, 11, 12, 13]}
    texts = ["".join(event.text for event in found if isinstance(event, Delta) and event.choice == n) for n in (0, 1)]
    assert texts == ["", "word word word word "]
    reasons = {event.choice: event.reason for event in found if isinstance(event, Done)}
    assert reasons == {0: FinishReason.TOOL_CALLS, 1: FinishReason.STOP}


async def test_a_reply_that_was_cut_behind_a_call_says_length() -> None:
    found = await collect([Started(), Delta("".join(CALL)), done(0, FinishReason.LENGTH)])
    assert [type(event) for event in found] == [Started, Called, Done]
    assert found[-1] == done(0, FinishReason.LENGTH)


async def test_without_tools_nothing_is_looked_for() -> None:
    events: list[ReplyEvent] = [Started(), Delta("".join(CALL)), done(0)]
    assert await collect(events, ()) == events
