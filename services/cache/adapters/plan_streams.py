"""Streams of plans: each is answered as soon as it is made, beside the others of its stream."""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable

from hypic.v1 import cache_pb2 as pb

from services.common.streams import DrainedStreams

__all__ = ["PlanStreams"]

_Answer = Callable[[pb.PlanRequest], Awaitable[pb.PlanResponse]]


class PlanStreams(DrainedStreams[pb.PlanRequest, pb.PlanResponse]):
    """All open streams. `answer` raises nothing."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(lambda requests: _PlanStream(answer, requests))


class _PlanStream:
    def __init__(self, answer: _Answer, requests: AsyncIterable[pb.PlanRequest]) -> None:
        self._answer = answer
        self._requests = requests
        self._plans: set[asyncio.Task[None]] = set()
        # Answers, and None once no further plan is read.
        self._answers: asyncio.Queue[pb.PlanResponse | None] = asyncio.Queue()
        self._num_unanswered = 0
        self._reading = asyncio.create_task(self._read())
        # Behind the task: one that is cancelled before it begins runs nothing of itself.
        self._reading.add_done_callback(lambda _: self._answers.put_nowait(None))

    async def next_message(self) -> pb.PlanResponse | None:
        """None behind the last one."""
        while self._num_unanswered or not self._reading.done():
            response = await self._answers.get()
            if response is not None:
                self._num_unanswered -= 1
                return response
        return None

    def stop_reading(self) -> None:
        self._reading.cancel()

    def cancel(self) -> None:
        self._reading.cancel()
        for plan in self._plans:
            plan.cancel()

    async def _read(self) -> None:
        async for request in self._requests:
            self._num_unanswered += 1
            plan = asyncio.create_task(self._plan(request))
            self._plans.add(plan)
            plan.add_done_callback(self._plans.discard)

    async def _plan(self, request: pb.PlanRequest) -> None:
        self._answers.put_nowait(await self._answer(request))
