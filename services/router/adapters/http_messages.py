"""Anthropic's Messages API over the same router."""

import asyncio
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from services.common.telemetry import current_request_id
from services.router.adapters.anthropic_parse import parse_messages, parse_prompt
from services.router.adapters.anthropic_replies import MessageWriter
from services.router.adapters.body import read_json
from services.router.adapters.http import Door
from services.router.adapters.http_errors import HttpError
from services.router.adapters.metrics import Generator, RouterMetrics
from services.router.adapters.openapi import describe
from services.router.adapters.parse import ParsedRequest
from services.router.adapters.streaming import ignored_header, open_stream, until_disconnect
from services.router.calling import with_calls
from services.router.domain.request import PromptError
from services.router.domain.tenancy import Scope
from services.router.served_model import Models

__all__ = ["MessageSurface"]

_TEXT = "Plepi is a port on the northern coast. The town was founded in 1903. It has 8215 inhabitants."
_DOCUMENT = {
    "type": "document",
    "title": "Plepi",
    "source": {"type": "text", "media_type": "text/plain", "data": _TEXT},
}
_ASKED = {
    "model": "demo",
    "messages": [{"role": "user", "content": [_DOCUMENT, {"type": "text", "text": "When was Plepi founded?"}]}],
}
_MESSAGES = describe(
    "Continue a conversation, in Anthropic's form",
    "MessageReply",
    body="MessagesBody",
    example=_ASKED | {"max_tokens": 32, "temperature": 0},
    streams="MessageEvent",
    errors=(400, 401, 403, 404, 413, 429, 500, 503, 504),
    error="AnthropicError",
)
_COUNT = describe(
    "How many tokens a prompt has",
    "TokenCount",
    body="CountBody",
    example=_ASKED,
    errors=(400, 401, 403, 404, 413, 500, 503),
    error="AnthropicError",
)


class MessageSurface:
    """`/v1/messages`."""

    def __init__(
        self, generator: Generator, models: Models, metrics: RouterMetrics, door: Door, max_parts: int
    ) -> None:
        self._generator = generator
        self._models = models
        self._metrics = metrics
        self._door = door
        self._max_parts = max_parts

    def routes(self) -> APIRouter:
        """Where the endpoints stand."""
        routes = APIRouter()
        routes.add_api_route("/v1/messages", self.create, methods=["POST"], **_MESSAGES)
        routes.add_api_route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"], **_COUNT)
        return routes

    async def create(self, request: Request) -> Response:
        """`POST /v1/messages`."""
        parsed = await self._parse(request)
        events = with_calls(self._generator.generate(parsed.request), parsed.tools.callable)
        request_id = current_request_id()
        writer = MessageWriter(f"msg_{request_id}", parsed)
        headers = ignored_header(parsed.ignored_fields)
        if not parsed.is_stream:
            return JSONResponse(await until_disconnect(request, writer.whole(events)), headers=headers)
        return await open_stream(request, events, partial(writer.events, request_id=request_id), headers)

    async def count_tokens(self, request: Request) -> Response:
        """`POST /v1/messages/count_tokens`."""
        self._door.gate.admit(request, Scope.GENERATE)
        name, prompt = parse_prompt(await read_json(request, self._door.max_body_bytes), self._max_parts)
        model = self._models.require()
        model.check_name(name)
        assembled = await asyncio.to_thread(model.assembler.assemble, prompt)
        return JSONResponse({"input_tokens": assembled.num_tokens})

    async def _parse(self, request: Request) -> ParsedRequest:
        try:
            caller = self._door.gate.admit(request, Scope.GENERATE)
            return parse_messages(await read_json(request, self._door.max_body_bytes), caller, self._max_parts)
        except (HttpError, PromptError) as error:
            self._metrics.count_error(error)
            raise
