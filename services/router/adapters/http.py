"""The REST surface."""

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.telemetry import TelemetryConfig
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.common.errors import HypicError, UnavailableError
from services.common.telemetry import current_request_id, get_logger
from services.router.adapters.auth import Gate
from services.router.adapters.body import read_json
from services.router.adapters.calibration_view import calibration_view
from services.router.adapters.http_errors import HttpError, http_error
from services.router.adapters.metrics import Generator, RouterMetrics
from services.router.adapters.middleware import HeadLimit, RequestIds, install_error_handlers
from services.router.adapters.openapi import describe, install_openapi
from services.router.adapters.parse import ParsedRequest, RequestParser
from services.router.adapters.replies import ChatFormat, CompletionFormat, ReplyFormat, ReplyHead, WholeChoice
from services.router.adapters.streaming import (
    DONE,
    ignored_header,
    open_stream,
    server_sent_event,
    until_disconnect,
)
from services.router.calling import Called, CalledEvent, with_calls
from services.router.domain.calibration import with_refresh
from services.router.domain.request import PromptError, Refresh
from services.router.domain.tenancy import Caller, Scope
from services.router.reply import Delta, Done
from services.router.served_model import Models

__all__ = ["Door", "Draining", "HttpSurface", "create_http_app", "create_operations_app"]


@dataclass(frozen=True, slots=True)
class Door:
    """Who and what is let in."""

    gate: Gate
    max_body_bytes: int


_GENERATION_ERRORS = (400, 401, 403, 404, 413, 429, 500, 503, 504)
_TEXT = "Plepi is a port on the northern coast. The town was founded in 1903. It has 8215 inhabitants."
_CHAT = describe(
    "Continue a conversation",
    "ChatReply",
    body="ChatBody",
    streams="ChatChunk",
    errors=_GENERATION_ERRORS,
    example={
        "model": "demo",
        "messages": [{"role": "user", "content": "When was Plepi founded?"}],
        "documents": [{"id": "plepi", "title": "Plepi", "text": _TEXT}],
        "temperature": 0,
        "max_tokens": 32,
        "hypic": {"explain": True},
    },
)
_COMPLETIONS = describe(
    "Continue a text",
    "CompletionReply",
    body="CompletionBody",
    streams="CompletionChunk",
    errors=_GENERATION_ERRORS,
    example={"model": "demo", "prompt": "The harbour opens", "max_tokens": 16, "temperature": 0},
)
_MODELS = describe("The served model", "ModelList", errors=(401, 403, 503))
_LIVE = describe("The process runs", "Health")
_READY = describe("The process can serve", "Health")
_READY["responses"][503] = {"description": "It cannot now.", "content": _READY["responses"][200]["content"]}


class Draining:
    """Set once the process is to end: readiness goes first."""

    def __init__(self) -> None:
        self.is_set = False


class HttpSurface:
    """The endpoints."""

    def __init__(
        self,
        generator: Generator,
        models: Models,
        parser: RequestParser,
        metrics: RouterMetrics,
        draining: Draining,
        door: Door,
        refresh: Refresh,
    ) -> None:
        """refresh: what requests are served with that do not say."""
        self._generator = generator
        self._models = models
        self._parser = parser
        self._metrics = metrics
        self._draining = draining
        self._door = door
        self._refresh = refresh

    def endpoints(self) -> Mapping[str, Callable[[Request], Awaitable[Response]]]:
        """Those that generate, by path."""
        return {"/v1/chat/completions": self.chat_completions, "/v1/completions": self.completions}

    def routes(self) -> APIRouter:
        """Where the endpoints stand."""
        routes = APIRouter()
        routes.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"], **_CHAT)
        routes.add_api_route("/v1/completions", self.completions, methods=["POST"], **_COMPLETIONS)
        routes.add_api_route("/v1/models", self.list_models, methods=["GET"], **_MODELS)
        return routes

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        parsed = await self._parse(request, self._parser.parse_chat)
        return await self._reply(request, parsed, ChatFormat(_head("chatcmpl", parsed), parsed))

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        parsed = await self._parse(request, self._parser.parse_completion)
        return await self._reply(request, parsed, CompletionFormat(_head("cmpl", parsed), parsed))

    async def list_models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        self._door.gate.admit(request, Scope.GENERATE)
        model = self._models.require()
        row = {
            "id": model.info.name,
            "object": "model",
            "created": model.created,
            "owned_by": "hypic",
            "max_model_len": model.info.context_length,
            "revision": model.info.revision,
            "calibration": calibration_view(with_refresh(self._models.calibration(), self._refresh)),
        }
        return JSONResponse({"object": "list", "data": [row]})

    async def live(self) -> Response:
        """`GET /health/live`: the loop runs."""
        return JSONResponse({"status": "live"})

    async def ready(self) -> Response:
        """`GET /health/ready`: a worker is described, its template is checked, and the process is not ending."""
        try:
            if self._draining.is_set:
                raise UnavailableError("the router is shutting down")
            model = self._models.require()
        except UnavailableError as error:
            return JSONResponse({"status": "not ready", "reason": str(error)}, 503)
        return JSONResponse({"status": "ready", "model": model.info.name})

    async def metrics(self) -> Response:
        """`GET /metrics`."""
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _parse(self, request: Request, parse: Callable[[object, Caller], ParsedRequest]) -> ParsedRequest:
        try:
            caller = self._door.gate.admit(request, Scope.GENERATE)
            return parse(await read_json(request, self._door.max_body_bytes), caller)
        except (HttpError, PromptError) as error:
            self._metrics.count_error(error)
            raise

    async def _reply(self, request: Request, parsed: ParsedRequest, form: ReplyFormat) -> Response:
        events = with_calls(
            self._generator.generate(parsed.request), parsed.tools.callable, ends_for_calls=not parsed.tools.is_named
        )
        headers = ignored_header(parsed.ignored_fields)
        if not parsed.is_stream:
            return JSONResponse(await until_disconnect(request, _collect(events, form)), headers=headers)
        return await open_stream(request, events, partial(_write_events, form=form), headers)


async def _collect(events: AsyncGenerator[CalledEvent], form: ReplyFormat) -> dict[str, object]:
    shown: defaultdict[int, list[CalledEvent]] = defaultdict(list)
    ends: list[Done] = []
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta | Called):
                shown[event.choice].append(event)
            elif isinstance(event, Done):
                ends.append(event)
    if not ends:
        raise HypicError("the reply ended without a finish")
    return form.whole([_whole(shown[done.choice], done) for done in _in_order(ends)])


def _whole(shown: Sequence[CalledEvent], done: Done) -> WholeChoice:
    deltas = [event for event in shown if isinstance(event, Delta)]
    calls = tuple(event.call for event in shown if isinstance(event, Called))
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return WholeChoice("".join(delta.text for delta in deltas), tokens, calls, done)


def _in_order(ends: Sequence[Done]) -> list[Done]:
    return sorted(ends, key=lambda done: done.choice)


async def _write_events(
    first: CalledEvent, events: AsyncGenerator[CalledEvent], form: ReplyFormat
) -> AsyncGenerator[bytes]:
    ends = [first] if isinstance(first, Done) else []
    async with aclosing(events):
        try:
            if opened := [*form.opening(), *_chunks(first, form)]:
                yield _together(opened)
            async for event in events:
                ends += [event] if isinstance(event, Done) else []
                if chunks := _chunks(event, form):
                    yield _together(chunks)
            if closed := list(form.ending(_in_order(ends))):
                yield _together(closed)
        except Exception as error:
            get_logger().exception("stream_failed")
            yield server_sent_event(http_error(error).envelope())
        yield DONE


def _together(chunks: Iterable[Mapping[str, object]]) -> bytes:
    """What is ready at once goes out at once: every write costs more than what it carries."""
    return b"".join(map(server_sent_event, chunks))


def _chunks(event: CalledEvent, form: ReplyFormat) -> list[dict[str, object]]:
    if isinstance(event, Delta):
        return [form.delta(event)]
    if isinstance(event, Called):
        return [form.called(event)]
    return list(form.closing(event)) if isinstance(event, Done) else []


def _head(prefix: str, parsed: ParsedRequest) -> ReplyHead:
    return ReplyHead(f"{prefix}-{current_request_id()}", int(time.time()), parsed.request.model)


def _request_spans() -> TelemetryConfig:
    """The framework's span of each call of the API, and nothing else of its telemetry: what it logs and measures holds texts."""
    return {
        "auto_configure": False,
        "logs": False,
        "metrics": False,
        "operation_spans": False,
        "exclude": lambda scope: not str(scope["path"]).startswith("/v1/"),
    }


def _own_version() -> str:
    """Of the package, which a checkout that is run as it is has not."""
    try:
        return version("hypic")
    except PackageNotFoundError:
        return "0"


def create_http_app(
    surface: HttpSurface,
    pages: Sequence[APIRouter],
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    *,
    has_metrics: bool = True,
    max_header_bytes: int = 1 << 16,
) -> FastAPI:
    """The ASGI application; `pages`: further endpoints. has_metrics: False where another listener serves them."""
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_request_spans())
    # They read their bodies themselves: the framework's reading of parameters would only take time. They stand among the
    # surface's routes too, for the OpenAPI document.
    for path, endpoint in surface.endpoints().items():
        app.router.add_route(path, endpoint, methods=["POST"])
    routes = surface.routes()
    _add_operations(routes, surface, has_metrics=has_metrics)
    app.include_router(routes)
    for page in pages:
        app.include_router(page)
    install_openapi(app, _own_version())
    install_error_handlers(app)
    app.add_middleware(HeadLimit, max_bytes=max_header_bytes)
    app.add_middleware(RequestIds)
    return app


def create_operations_app(surface: HttpSurface) -> FastAPI:
    """What probes and Prometheus ask for, and nothing else."""
    app = FastAPI(title="hypic router operations", openapi_url=None, redirect_slashes=False)
    routes = APIRouter()
    _add_operations(routes, surface, has_metrics=True)
    app.include_router(routes)
    install_error_handlers(app)
    return app


def _add_operations(routes: APIRouter, surface: HttpSurface, *, has_metrics: bool) -> None:
    """Endpoints of those who run the router; they need no key."""
    routes.add_api_route("/health/live", surface.live, methods=["GET"], **_LIVE)
    routes.add_api_route("/health/ready", surface.ready, methods=["GET"], **_READY)
    if has_metrics:
        routes.add_api_route("/metrics", surface.metrics, methods=["GET"], include_in_schema=False)
