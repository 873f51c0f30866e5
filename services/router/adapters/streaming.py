"""Server-sent events, and the client's disconnect as a cancellation."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.telemetry import get_logger
from services.router.domain.errors import RouterError

__all__ = ["ClientGoneError", "EventStream", "first_event", "ignored_header", "server_sent_event", "until_disconnect"]

Result = TypeVar("Result")

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


async def until_disconnect(request: Request, work: Coroutine[None, None, Result]) -> Result:
    """The work's result; the work is cancelled, and has ended, when the client goes first.

    Raises:
        ClientGoneError: it went.
    """
    return await _race(work, _disconnect(request.receive))


class EventStream(Response):
    """A reply in events. However it ends, the generator behind it is closed before this returns."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        # A stream's length is not known; the base class counted an empty body.
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop at the client's disconnect."""
        try:
            await _race(self._send_all(send), _disconnect(receive))
        except ClientGoneError:
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _race(work: Coroutine[None, None, Result], gone: Coroutine[None, None, None]) -> Result:
    """The work's result, or its cancellation when `gone` ends first. It runs in the caller's task: one less a request."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("only a task can be cancelled")
    left: list[BaseException | None] = []

    def leave(watcher: "asyncio.Task[None]") -> None:
        if not watcher.cancelled():
            left.append(watcher.exception())
            task.cancel()

    watcher = asyncio.create_task(gone)
    watcher.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        # Cancelled by someone else as well, the task goes on ending for them.
        if left and task.uncancel() == 0:
            raise (left[0] or ClientGoneError()) from None
        raise
    finally:
        watcher.remove_done_callback(leave)
        watcher.cancel()
