"""All plans of this router over one stream to the cache service: for both far cheaper than a call a plan."""

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import count

import grpc
from hypic.v1 import cache_pb2, cache_pb2_grpc

from services.common.errors import DeadlineError, UnavailableError, error_from_code

__all__ = ["PlanStream"]

_Call = grpc.aio.StreamStreamCall[cache_pb2.PlanRequest, cache_pb2.PlanResponse]


class PlanStream:
    """Opened with the first plan, and with the next one after it has ended for whatever reason.

    `give_back` is handed the new lease of a plan whose caller did not wait for the answer.
    """

    def __init__(self, stub: "cache_pb2_grpc.CacheServiceAsyncStub", give_back: Callable[[str], None]) -> None:
        self._stub = stub
        self._give_back = give_back
        self._stream: _OpenStream | None = None

    async def plan(self, request: cache_pb2.PlanRequest, timeout_seconds: float) -> cache_pb2.PlanResponse:
        """The answer to one plan; `request.call` is set here.

        Raises:
            HypicError: the plan was not made, the stream broke before its answer came, or none came in time.
        """
        if self._stream is None or self._stream.has_ended:
            self._stream = _OpenStream(self._stub.Plan(), self._give_back)
        try:
            async with asyncio.timeout(timeout_seconds):
                response = await self._stream.ask(request)
        except TimeoutError as error:
            raise DeadlineError("the cache service did not answer in time") from error
        if response.HasField("failure"):
            raise error_from_code(response.failure.status, response.failure.message)
        return response


class _OpenStream:
    def __init__(self, call: _Call, give_back: Callable[[str], None]) -> None:
        self._call = call
        self._give_back = give_back
        self._numbers = count(1)
        self._unsent: deque[cache_pb2.PlanRequest] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[cache_pb2.PlanResponse]] = {}
        # Plans that nobody waits for any more, and that bring a lease of their own.
        self._left: set[int] = set()
        # Answers to plans whose callers are cancelled and have yet to learn it.
        self._unheard: dict[int, cache_pb2.PlanResponse] = {}
        self._reading = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._reading.done()

    async def ask(self, request: cache_pb2.PlanRequest) -> cache_pb2.PlanResponse:
        """The answer, which may be a failure."""
        request.call = next(self._numbers)
        answer: asyncio.Future[cache_pb2.PlanResponse] = asyncio.get_running_loop().create_future()
        self._answers[request.call] = answer
        self._unsent.append(request)
        # Apart from those who ask: cancelling a write would cancel the stream.
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        try:
            return await answer
        except asyncio.CancelledError:
            self._leave(request, answer)
            raise
        finally:
            del self._answers[request.call]
            self._unheard.pop(request.call, None)

    def _leave(self, request: cache_pb2.PlanRequest, answer: "asyncio.Future[cache_pb2.PlanResponse]") -> None:
        """Nobody waits for this plan any more. A lease that it was to extend is its request's to release."""
        if request in self._unsent:
            self._unsent.remove(request)
        elif not request.lease_id:
            self._left.add(request.call)
            if request.call in self._unheard:
                self._take_late(self._unheard[request.call])
            elif answer.done() and not answer.cancelled() and not answer.exception():
                self._take_late(answer.result())

    def _take_late(self, response: cache_pb2.PlanResponse) -> None:
        if response.call in self._left:
            self._left.discard(response.call)
            if response.lease_id:
                self._give_back(response.lease_id)

    async def _send(self) -> None:
        try:
            while self._unsent:
                await self._call.write(self._unsent.popleft())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended; its reader learns why, and tells everyone.
            return

    async def _read(self) -> None:
        error = UnavailableError("the cache service ended the stream of plans")
        try:
            async for response in self._call:
                answer = self._answers.get(response.call)
                if answer and not answer.done():
                    answer.set_result(response)
                elif answer:
                    self._unheard[response.call] = response
                else:
                    self._take_late(response)
        except grpc.aio.AioRpcError as broken:
            # Errors of plans come within the stream; what ends it is the way to the service, whatever its status says.
            error = UnavailableError(f"the stream of plans broke: {broken.details() or broken.code().name.lower()}")
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(error)
