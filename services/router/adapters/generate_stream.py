"""All replies of one worker over one stream: what is said and heard at a time goes in one message, for both far cheaper than a
call a reply.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count

import grpc
from hypic.v1 import worker_pb2, worker_pb2_grpc

from services.common.errors import DeadlineError, HypicError, InternalError, UnavailableError, error_from_code
from services.common.telemetry import current_request_id
from services.common.tracing import trace_parent

__all__ = ["GenerateCall", "GenerateStream"]

_Stream = grpc.aio.StreamStreamCall[worker_pb2.GenerateOrders, worker_pb2.GenerateEvents]
_Write = Callable[[worker_pb2.GenerateRequest], None]
_LAST_EVENTS = ("finished", "released")


class GenerateStream:
    """Opened with the first call, and with the next one after it has ended for whatever reason."""

    def __init__(self, stub: "worker_pb2_grpc.WorkerServiceAsyncStub") -> None:
        self._stub = stub
        self._open: _OpenStream | None = None

    def begin(self, write: _Write, timeout_seconds: float) -> "GenerateCall":
        """Send the request that `write` fills in, with number, deadline and place in the trace; `leave` the call in any case."""
        if self._open is None or self._open.has_ended:
            self._open = _OpenStream(self._stub.Generate())
        return self._open.begin(write, timeout_seconds)

    def fail_all(self, reason: str) -> None:
        """End every call under way with an `UnavailableError`."""
        if self._open is not None:
            self._open.fail_all(reason)


class GenerateCall:
    """One reply's events. `leave` it however it ends."""

    def __init__(self, stream: "_OpenStream", number: int, timeout_seconds: float) -> None:
        self.number = number
        self._stream: _OpenStream | None = stream
        self._events: deque[worker_pb2.GenerateEvent] = deque()
        self._error: HypicError | None = None
        self._heard: asyncio.Future[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(timeout_seconds, self._run_out)
        self.has_ended = False

    async def next(self) -> worker_pb2.GenerateEvent:
        """The next event.

        Raises:
            HypicError: the worker has failed or refused the call, cannot be reached, or the time is up.
        """
        while not self._events:
            if self._error is not None:
                raise self._error
            if self.has_ended:
                raise InternalError("the worker has said all of this call")
            self._heard = asyncio.get_running_loop().create_future()
            try:
                await self._heard
            finally:
                self._heard = None
        event = self._events.popleft()
        kind = event.WhichOneof("event")
        if kind == "failed":
            self.has_ended = True
            raise error_from_code(event.failed.status, event.failed.message)
        self.has_ended = kind in _LAST_EVENTS
        return event

    def leave(self) -> None:
        """Nothing more is wanted; the worker hears of it where it has not said its last."""
        self._timer.cancel()
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.leave(self)

    def hear(self, event: worker_pb2.GenerateEvent) -> None:
        """An event has come."""
        self._events.append(event)
        self._wake()

    def fail(self, error: HypicError) -> None:
        """Behind the events that have come nothing but this error follows."""
        if self._error is None:
            self._error = error
        self._wake()

    def _run_out(self) -> None:
        self.fail(DeadlineError("the worker did not end its reply in time"))

    def _wake(self) -> None:
        if self._heard is not None and not self._heard.done():
            self._heard.set_result(None)


class _OpenStream:
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._numbers = count(1)
        self._calls: dict[int, GenerateCall] = {}
        self._orders = worker_pb2.GenerateOrders()
        self._has_orders = False
        self._sending: asyncio.Task[None] | None = None
        self._reading = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._reading.done()

    def begin(self, write: _Write, timeout_seconds: float) -> GenerateCall:
        request = self._orders.begun.add()
        try:
            write(request)
        except BaseException:
            del self._orders.begun[-1]
            raise
        call = GenerateCall(self, next(self._numbers), timeout_seconds)
        request.call, request.timeout_seconds = call.number, timeout_seconds
        request.traceparent = trace_parent()
        # As metadata of other calls has it: that of the client's request, which several replies may have.
        request.request_id = current_request_id() or request.request_id
        self._calls[call.number] = call
        self._send_soon()
        return call

    def leave(self, call: GenerateCall) -> None:
        if self._calls.pop(call.number, None) and not call.has_ended and not self.has_ended:
            self._orders.cancelled.append(call.number)
            self._send_soon()

    def fail_all(self, reason: str) -> None:
        for call in self._calls.values():
            call.fail(UnavailableError(reason))

    def _send_soon(self) -> None:
        self._has_orders = True
        # Apart from those who ask: cancelling a write would cancel the stream.
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._has_orders:
                orders, self._orders, self._has_orders = self._orders, worker_pb2.GenerateOrders(), False
                await self._stream.write(orders)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended; its reader learns why, and tells everyone.
            return

    def _hear(self, events: Iterable[worker_pb2.GenerateEvent]) -> None:
        for event in events:
            # Nobody waits any more for what was left.
            if call := self._calls.get(event.call):
                call.hear(event)

    async def _read(self) -> None:
        reason = "the worker ended its stream of replies"
        try:
            async for message in self._stream:
                self._hear(message.events)
        except grpc.aio.AioRpcError as broken:
            # Errors of calls come within the stream; what ends it is the way to the worker, whatever its status says.
            reason = f"the stream of replies broke: {broken.details() or broken.code().name.lower()}"
        finally:
            self.fail_all(reason)
