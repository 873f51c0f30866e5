"""Server-sent events, and the client's disconnect as a cancellation."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.telemetry import get_logger
from services.router.domain.errors import RouterError

__all__ = ["ClientGoneError", "ignored_header", "open_stream", "server_sent_event", "until_disconnect"]

Result = TypeVar("Result")

_Write = Callable[[Result, AsyncGenerator[Result]], AsyncGenerator[bytes]]
DONE = b"data: [DONE]\n\n"


class ClientGoneError(RouterError):
    """The client closed the connection before it had its reply."""


def server_sent_event(payload: Mapping[str, Any]) -> bytes:
    """One event; JSON never holds a raw line break."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


async def first_event(events: AsyncGenerator[Result]) -> Result:
    """The first of these events; they are closed when there is none."""
    try:
        return await anext(events)
    except BaseException:
        await events.aclose()
        raise


def ignored_header(names: Sequence[str]) -> Mapping[str, str]:
    """Tells a client which of its fields were not understood."""
    if not names:
        return {}
    shown = ",".join(name for name in names if name.isascii() and name.isidentifier())
    get_logger().info("fields_ignored", fields=shown)
    return {"x-hypic-ignored-fields": shown[:1024]}


class Client:
    """Who waits for one reply: what is done for it is cancelled when it goes first.

    Made, used and closed in one task, with no pause between one piece of work and the next.
    """

    def __init__(self, receive: Receive) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task can be cancelled")
        self._task = task
        self._left: list[BaseException | None] = []
        # One for all that is done for it.
        self._watcher = asyncio.create_task(_disconnect(receive))
        self._watcher.add_done_callback(self._leave)

    async def wait(self, work: Coroutine[None, None, Result]) -> Result:
        """The work's result; it runs in the caller's task, and has ended when this ends.

        Raises:
            ClientGoneError: the client went.
        """
        try:
            return await work
        except asyncio.CancelledError:
            # Cancelled by someone else as well, the task goes on ending for them.
            if self._left and self._task.uncancel() == 0:
                raise (self._left[0] or ClientGoneError()) from None
            raise

    def close(self) -> None:
        """Watch no more."""
        self._watcher.remove_done_callback(self._leave)
        self._watcher.cancel()

    def _leave(self, watcher: "asyncio.Task[None]") -> None:
        if not watcher.cancelled():
            self._left.append(watcher.exception())
            self._task.cancel()


async def until_disconnect(request: Request, work: Coroutine[None, None, Result]) -> Result:
    """The work's result; the work is cancelled, and has ended, when the client goes first.

    Raises:
        ClientGoneError: it went.
    """
    client = Client(request.receive)
    try:
        return await client.wait(work)
    finally:
        client.close()


async def open_stream(
    request: Request, events: AsyncGenerator[Result], write: _Write[Result], headers: Mapping[str, str]
) -> Response:
    """A reply in events. The status line waits for the first one, so that a refusal is a status and not an event.

    write: the stream's bytes, from its first event and the rest.

    Raises:
        ClientGoneError: the client went first.
    """
    client = Client(request.receive)
    try:
        first = await client.wait(first_event(events))
    except BaseException:
        client.close()
        raise
    return EventStream(write(first, events), headers, client)


class EventStream(Response):
    """A reply in events. However it ends, the generator behind it is closed before this returns."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], headers: Mapping[str, str], client: Client) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        # A stream's length is not known; the base class counted an empty body.
        del self.headers["content-length"]
        self._events = events
        self._client = client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop at the client's disconnect."""
        try:
            await self._client.wait(self._send_all(send))
        except ClientGoneError:
            return
        finally:
            self._client.close()

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
