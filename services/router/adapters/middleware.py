"""What surrounds every endpoint: request ids and OpenAI's error envelope."""

import string

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import HypicError
from services.common.telemetry import current_request_id, get_logger, new_request_id, set_request_id
from services.common.tracing import current_span
from services.router.adapters.anthropic_replies import anthropic_envelope
from services.router.adapters.http_errors import HttpError, http_error
from services.router.adapters.streaming import ClientGoneError
from services.router.domain.errors import RouterError

__all__ = ["HeadLimit", "RequestIds", "error_response", "install_error_handlers", "is_expected"]

_MAX_REQUEST_ID = 128
# Where errors and request ids are as Anthropic's clients read them.
_ANTHROPIC = "/v1/messages"
_PRINTABLE = frozenset(string.ascii_letters + string.digits + string.punctuation)
# nginx's word for a client that closed the connection; nobody receives it, logs show it.
_CLIENT_CLOSED_REQUEST = 499


class RequestIds:
    """Takes `x-request-id` from the client, or makes one, binds it to the task, and sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _is_valid(given) else new_request_id()
        set_request_id(request_id)
        current_span().set_attribute("hypic.request_id", request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if scope["path"].startswith(_ANTHROPIC):
                    headers["request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class HeadLimit:
    """Refuses requests whose headers and path are larger than a limit: no key, and no document, needs as much."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            size = sum(len(name) + len(value) for name, value in scope["headers"])
            size += len(scope.get("raw_path") or b"") + len(scope["query_string"])
            if size > self._max_bytes:
                error = HttpError(
                    431,
                    "invalid_request_error",
                    f"the request's head is larger than {self._max_bytes} bytes",
                    "request_head_too_large",
                    None,
                    {"x-should-retry": "false"},
                )
                await JSONResponse(error.envelope(), error.status, error.headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_valid(request_id: str) -> bool:
    return 0 < len(request_id) <= _MAX_REQUEST_ID and _PRINTABLE.issuperset(request_id)


def install_error_handlers(app: FastAPI) -> None:
    """Every error leaves as OpenAI's envelope."""
    for kind in (HypicError, RouterError):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(Exception, _handle)
    app.add_exception_handler(HTTPException, _handle_framework)
    app.add_exception_handler(ClientGoneError, _handle_gone)
    app.add_exception_handler(ClientDisconnect, _handle_gone)


async def error_response(request: Request, error: Exception) -> Response:
    """What the handlers answer to an error that an endpoint has raised."""
    if isinstance(error, ClientGoneError | ClientDisconnect):
        return await _handle_gone(request, error)
    return await _handle(request, error)


def is_expected(error: Exception) -> bool:
    """Whether an error is one of ours, or a client's end, and no fault of the code."""
    return isinstance(error, HypicError | RouterError | ClientDisconnect)


async def _handle(request: Request, error: Exception) -> Response:
    seen = http_error(error)
    if seen.status >= 500:
        get_logger().error("request_failed", status=seen.status, error=repr(error))
    return _refuse(request, seen)


async def _handle_framework(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    codes = {404: "not_found", 405: "method_not_allowed"}
    headers = {**(error.headers or {}), "x-should-retry": "false"}
    seen = HttpError(
        error.status_code, "invalid_request_error", str(error.detail), codes.get(error.status_code), None, headers
    )
    return _refuse(request, seen)


def _refuse(request: Request, seen: HttpError) -> Response:
    """In the form of the API that was called."""
    if request.url.path.startswith(_ANTHROPIC):
        return JSONResponse(anthropic_envelope(seen, current_request_id()), seen.status, seen.headers)
    return JSONResponse(seen.envelope(), seen.status, seen.headers)


async def _handle_gone(_request: Request, _error: Exception) -> Response:
    get_logger().info("client_gone")
    return Response(status_code=_CLIENT_CLOSED_REQUEST)
