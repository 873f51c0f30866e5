"""A worker seen through a proxy that can hold, slow, spoil or cut what it sends; in a thread with a loop of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from hypic.v1 import worker_pb2, worker_pb2_grpc

from services.common.rpc import create_channel

__all__ = ["Fault", "WorkerProxy"]

_SERVICE = "/hypic.v1.WorkerService/"
_STREAMS = ("Describe", "Capture", "Fetch")
_BOTH_WAYS = "Generate"
_CALLS = ("Drop", "Report")


@dataclass(slots=True)
class Fault:
    """What happens to the messages of one method from one of them on. `reached` is set when that one is about to be sent."""

    method: str
    at_message: int = 0
    hold_seconds: float = 0.0
    slow_seconds: float = 0.0
    flips_byte: bool = False
    cuts: bool = False
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    async def apply(self, index: int, message: bytes) -> bytes:
        """The message as it is sent; raises ConnectionError where the stream is cut."""
        if index < self.at_message:
            return message
        self.reached.set()
        await asyncio.sleep(self.slow_seconds)
        for _ in range(int(self.hold_seconds / 0.01)):
            if self.released.is_set():
                break
            await asyncio.sleep(0.01)
        if self.cuts:
            raise ConnectionError("cut")
        return _flip(message) if self.flips_byte else message


def _flip(message: bytes) -> bytes:
    """A chunk with one bit of its data flipped; a chunk without data as it is."""
    chunk = worker_pb2.Chunk.FromString(message)
    if chunk.data:
        middle = len(chunk.data) // 2
        chunk.data = chunk.data[:middle] + bytes([chunk.data[middle] ^ 1]) + chunk.data[middle + 1 :]
    return chunk.SerializeToString()


class WorkerProxy(grpc.GenericRpcHandler):
    """Listens on a port of its own. fault: what happens now; None passes everything on."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.fault: Fault | None = None
        self.address = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def wait_through(self, seconds: float) -> None:
        """Until the worker behind answers."""
        self._call(self._report(seconds))

    async def _report(self, seconds: float) -> None:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        await stub.Report(worker_pb2.ReportRequest(), timeout=seconds, wait_for_ready=True)

    def service(self, handler_call_details: Any) -> Any:  # noqa: ANN401 # untyped in the stubs
        """See grpc: bytes in, bytes out."""
        method = handler_call_details.method
        name = method.removeprefix(_SERVICE)
        if name in _STREAMS:
            return grpc.unary_stream_rpc_method_handler(self._stream(method, name))
        if name == _BOTH_WAYS:
            return grpc.stream_stream_rpc_method_handler(self._stream(method, name))
        return grpc.unary_unary_rpc_method_handler(self._unary(method)) if name in _CALLS else None

    def _stream(self, method: str, name: str) -> Callable[[Any, Any], AsyncIterator[bytes]]:
        """request: bytes, or an iterator of them."""

        async def handle(request: Any, context: Any) -> AsyncIterator[bytes]:  # noqa: ANN401
            kind = self._channel.stream_stream if name == _BOTH_WAYS else self._channel.unary_stream
            stub: Any = kind(method)
            call = stub(request, timeout=context.time_remaining(), metadata=context.invocation_metadata())
            index = 0
            try:
                async for message in call:
                    fault = self.fault
                    yield await fault.apply(index, message) if fault and fault.method == name else message
                    index += 1
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
            except ConnectionError:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was cut")
            finally:
                call.cancel()

        return handle

    def _unary(self, method: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def handle(request: bytes, context: Any) -> bytes:  # noqa: ANN401
            stub: Any = self._channel.unary_unary(method)
            try:
                answer: bytes = await stub(request, timeout=context.time_remaining())
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
                raise
            return answer

        return handle

    async def _start(self) -> None:
        self._channel = create_channel(self._target)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def _stop(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def _call(self, work: Any) -> Any:  # noqa: ANN401
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)
