"""Endpoints that nearly all requests go to, reached past the framework's layers, whose work is a twentieth of a request's."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.router.adapters.middleware import HeadLimit, RequestIds, error_response, is_expected

__all__ = ["DirectRoutes"]

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """An application that answers POSTs to these paths itself, with the same limits, ids and errors, and leaves all else to
    another one. That one knows the paths too: where requests are traced it serves them, since the spans are its own.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint], max_header_bytes: int) -> None:
        self._app = app
        self._endpoints = endpoints
        self._direct = RequestIds(HeadLimit(self._serve, max_header_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        is_direct = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._endpoints
        await (self._direct if is_direct else self._app)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._endpoints[scope["path"]](request)
        except Exception as error:
            await (await error_response(request, error))(scope, receive, send)
            if not is_expected(error):
                # The server logs where it comes from.
                raise
            return
        await response(scope, receive, send)
