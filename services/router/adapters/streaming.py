"""Server-sent events, and the client's disconnect as a cancellation."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

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
    return b"data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


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
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(gone)
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGoneError
        return worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)
