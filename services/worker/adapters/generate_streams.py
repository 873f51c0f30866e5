"""Streams of generations: many calls on one stream, whose events go together as they come."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing
from functools import partial

from hypic.v1 import cache_pb2, worker_pb2

from services.common.errors import DeadlineError, HypicError, InternalError, status_code
from services.common.streams import DrainedStreams
from services.common.telemetry import get_logger, set_request_id
from services.common.tracing import serve_rpc

__all__ = ["GenerateStreams"]

_Answer = Callable[[worker_pb2.GenerateRequest], AsyncGenerator[worker_pb2.GenerateEvent]]
_GENERATE = "/hypic.v1.WorkerService/Generate"
_LAST_EVENTS = ("finished", "released")


class GenerateStreams(DrainedStreams[worker_pb2.GenerateOrders, worker_pb2.GenerateEvents]):
    """All open streams. answer: one call's events; its errors end that call alone, and it is closed when its caller leaves it."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(lambda orders: _GenerateStream(answer, orders))


class _GenerateStream:
    def __init__(self, answer: _Answer, orders: AsyncIterable[worker_pb2.GenerateOrders]) -> None:
        self._answer = answer
        self._orders = orders
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._said = worker_pb2.GenerateEvents()
        self._has_news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(lambda _: self._has_news.set())

    async def next_message(self) -> worker_pb2.GenerateEvents | None:
        """What has been said since the last time, at least one event; None behind the last one."""
        while not self._said.events:
            if self._reading.done() and not self._calls:
                return None
            self._has_news.clear()
            await self._has_news.wait()
        events, self._said = self._said, worker_pb2.GenerateEvents()
        return events

    def stop_reading(self) -> None:
        self._reading.cancel()

    def cancel(self) -> None:
        self._reading.cancel()
        for call in self._calls.values():
            call.cancel()

    async def _read(self) -> None:
        async for orders in self._orders:
            for request in orders.begun:
                call = self._calls[request.call] = asyncio.create_task(self._run(request))
                call.add_done_callback(partial(self._forget, request.call))
            for number in orders.cancelled:
                if number in self._calls:
                    self._calls[number].cancel()

    def _forget(self, number: int, _call: "asyncio.Task[None]") -> None:
        del self._calls[number]
        self._has_news.set()

    def _say(self, call: int, event: worker_pb2.GenerateEvent) -> None:
        event.call = call
        self._said.events.append(event)
        self._has_news.set()

    async def _run(self, request: worker_pb2.GenerateRequest) -> None:
        """Logs, calls and spans of the task belong to the caller's request."""
        set_request_id(request.request_id)
        with serve_rpc(_GENERATE, request.traceparent):
            try:
                async with asyncio.timeout(request.timeout_seconds or None):
                    await self._follow(request)
            except HypicError as error:
                self._fail(request.call, error)
            except TimeoutError:
                self._fail(request.call, DeadlineError("the reply took longer than the time allowed"))
            except Exception:
                get_logger().exception("rpc_failed")
                self._fail(request.call, InternalError("the reply failed; the worker's log says why"))

    async def _follow(self, request: worker_pb2.GenerateRequest) -> None:
        last = ""
        async with aclosing(self._answer(request)) as events:
            async for event in events:
                last = event.WhichOneof("event") or ""
                self._say(request.call, event)
        if last not in _LAST_EVENTS:
            raise InternalError("the reply ended without a finish")

    def _fail(self, call: int, error: HypicError) -> None:
        failure = cache_pb2.CallFailure(status=status_code(error), message=str(error))
        self._say(call, worker_pb2.GenerateEvent(failed=failure))
