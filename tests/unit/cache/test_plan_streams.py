"""Answers of one stream of plans: in any order, none lost at the end, none made for a caller who has gone."""

import asyncio
from collections.abc import AsyncGenerator

from hypic.v1 import cache_pb2 as pb

from services.cache.adapters.plan_streams import PlanStreams


class Caller:
    """Sends plans by number; each is answered when the test says so."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[int | None] = asyncio.Queue()
        self.may_answer = [asyncio.Event() for _ in range(3)]
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.streams = PlanStreams(self._answer)

    async def _answer(self, request: pb.PlanRequest) -> pb.PlanResponse:
        self.begun.append(request.call)
        try:
            await self.may_answer[request.call].wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.call)
            raise
        return pb.PlanResponse(call=request.call)

    async def _requests(self) -> AsyncGenerator[pb.PlanRequest]:
        while (number := await self.sent.get()) is not None:
            yield pb.PlanRequest(call=number)

    def send(self, *numbers: int | None) -> AsyncGenerator[pb.PlanResponse]:
        for number in numbers:
            self.sent.put_nowait(number)
        return self.streams.serve(self._requests())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_plan_is_answered_although_an_earlier_one_is_not() -> None:
    caller = Caller()
    answers = caller.send(0, 1)
    caller.may_answer[1].set()
    assert (await anext(answers)).call == 1
    caller.may_answer[0].set()
    assert (await anext(answers)).call == 0
    await answers.aclose()


async def test_a_caller_who_sends_no_more_gets_every_answer() -> None:
    caller = Caller()
    answers = caller.send(0, 1, None)
    waiting = asyncio.ensure_future(anext(answers))
    await settle()
    for event in caller.may_answer:
        event.set()
    assert {(await waiting).call, *[answer.call async for answer in answers]} == {0, 1}


async def test_a_drained_stream_answers_what_it_has_read_and_ends() -> None:
    caller = Caller()
    answers = caller.send(0)
    waiting = asyncio.ensure_future(anext(answers))
    await settle()
    caller.streams.drain()
    caller.sent.put_nowait(1)
    caller.may_answer[0].set()
    assert (await waiting).call == 0
    assert [answer async for answer in answers] == []
    assert caller.begun == [0]


async def test_an_idle_stream_ends_when_it_is_drained() -> None:
    caller = Caller()
    waiting = asyncio.ensure_future(anext(caller.send(), None))
    await settle()
    assert not waiting.done()
    caller.streams.drain()
    assert await waiting is None


async def test_a_stream_that_begins_while_draining_ends() -> None:
    caller = Caller()
    waiting = asyncio.ensure_future(anext(caller.send(0), None))
    # One round of the event loop: the stream is open, and its reader has yet to begin.
    await asyncio.sleep(0)
    caller.streams.drain()
    async with asyncio.timeout(5):
        assert await waiting is None
        assert [answer async for answer in caller.send(1)] == []
    assert caller.begun == []


async def test_plans_of_a_caller_who_has_gone_are_given_up() -> None:
    caller = Caller()
    answers = caller.send(0, 1, 2)
    caller.may_answer[1].set()
    await anext(answers)
    await answers.aclose()
    await settle()
    assert sorted(caller.cancelled) == [0, 2]
