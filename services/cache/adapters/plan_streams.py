"""Streams of plans: each is answered as soon as it is made, beside the others of its stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable

from hypic.v1 import cache_pb2 as pb

__all__ = ["PlanStreams"]

_Answer = Callable[[pb.PlanRequest], Awaitable[pb.PlanResponse]]


class PlanStreams:
    """All open streams. `answer` raises nothing."""

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer
        self._streams: set[_PlanStream] = set()
        self._is_draining = False

    async def serve(self, requests: AsyncIterable[pb.PlanRequest]) -> AsyncGenerator[pb.PlanResponse]:
        """The answers to the plans of one stream, until the caller ends it or the streams are drained."""
        if self._is_draining:
            return
        stream = _PlanStream(self._answer, requests)
        self._streams.add(stream)
        try:
            while (response := await stream.next_answer()) is not None:
                yield response
        finally:
            self._streams.discard(stream)
            stream.cancel()

    def drain(self) -> None:
        """Read no further plan; every stream ends with the answers to those that were read, a new one at once."""
        self._is_draining = True
        for stream in self._streams:
            stream.stop_reading()


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

    async def next_answer(self) -> pb.PlanResponse | None:
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
