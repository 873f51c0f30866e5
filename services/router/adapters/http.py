"""The REST surface."""

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.common.errors import HypicError, UnavailableError
from services.common.telemetry import current_request_id, get_logger
from services.router.adapters.auth import Gate
from services.router.adapters.body import read_json
from services.router.adapters.http_errors import HttpError, http_error
from services.router.adapters.metrics import Generator, RouterMetrics
from services.router.adapters.middleware import HeadLimit, RequestIds, install_error_handlers
from services.router.adapters.parse import ParsedRequest, RequestParser
from services.router.adapters.replies import ChatFormat, CompletionFormat, ReplyFormat, ReplyHead, WholeChoice
from services.router.adapters.streaming import DONE, EventStream, server_sent_event, until_disconnect
from services.router.domain.request import PromptError
from services.router.domain.tenancy import Caller, Scope
from services.router.reply import Delta, Done, ReplyEvent
from services.router.served_model import Models

__all__ = ["Door", "Draining", "HttpSurface", "create_http_app", "create_operations_app"]


@dataclass(frozen=True, slots=True)
class Door:
    """Who and what is let in."""

    gate: Gate
    max_body_bytes: int


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
    ) -> None:
        self._generator = generator
        self._models = models
        self._parser = parser
        self._metrics = metrics
        self._draining = draining
        self._door = door

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
        events = self._generator.generate(parsed.request)
        headers = _ignored_header(parsed)
        if not parsed.is_stream:
            return JSONResponse(await until_disconnect(request, _collect(events, form)), headers=headers)
        # The status line waits for the first event, so that a refusal is a status and not an event.
        first = await until_disconnect(request, _first(events))
        return EventStream(_write_events(first, events, form), headers)


async def _first(events: AsyncGenerator[ReplyEvent]) -> ReplyEvent:
    try:
        return await anext(events)
    except BaseException:
        await events.aclose()
        raise


async def _collect(events: AsyncGenerator[ReplyEvent], form: ReplyFormat) -> dict[str, object]:
    deltas: defaultdict[int, list[Delta]] = defaultdict(list)
    ends: list[Done] = []
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                deltas[event.choice].append(event)
            elif isinstance(event, Done):
                ends.append(event)
    if not ends:
        raise HypicError("the reply ended without a finish")
    return form.whole([_whole(deltas[done.choice], done) for done in _in_order(ends)])


def _whole(deltas: Sequence[Delta], done: Done) -> WholeChoice:
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return WholeChoice("".join(delta.text for delta in deltas), tokens, done)


def _in_order(ends: Sequence[Done]) -> list[Done]:
    return sorted(ends, key=lambda done: done.choice)


async def _write_events(
    first: ReplyEvent, events: AsyncGenerator[ReplyEvent], form: ReplyFormat
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


def _chunks(event: ReplyEvent, form: ReplyFormat) -> list[dict[str, object]]:
    if isinstance(event, Delta):
        return [form.delta(event)]
    return list(form.closing(event)) if isinstance(event, Done) else []


def _head(prefix: str, parsed: ParsedRequest) -> ReplyHead:
    return ReplyHead(f"{prefix}-{current_request_id()}", int(time.time()), parsed.request.model)


def _ignored_header(parsed: ParsedRequest) -> Mapping[str, str]:
    if not parsed.ignored_fields:
        return {}
    names = ",".join(name for name in parsed.ignored_fields if name.isascii() and name.isidentifier())
    get_logger().info("fields_ignored", fields=names)
    return {"x-hypic-ignored-fields": names[:1024]}


def create_http_app(
    surface: HttpSurface,
    pages: Sequence[APIRouter],
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    *,
    has_metrics: bool = True,
    max_header_bytes: int = 1 << 16,
) -> FastAPI:
    """The ASGI application; `pages`: further endpoints. has_metrics: False where another listener serves them."""
    app = FastAPI(title="hypic router", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    routes = APIRouter()
    # They read their bodies themselves: the framework's reading of parameters would only take time.
    app.router.add_route("/v1/chat/completions", surface.chat_completions, methods=["POST"])
    app.router.add_route("/v1/completions", surface.completions, methods=["POST"])
    routes.add_api_route("/v1/models", surface.list_models, methods=["GET"])
    _add_operations(routes, surface, has_metrics=has_metrics)
    app.include_router(routes)
    for page in pages:
        app.include_router(page)
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
    routes.add_api_route("/health/live", surface.live, methods=["GET"])
    routes.add_api_route("/health/ready", surface.ready, methods=["GET"])
    if has_metrics:
        routes.add_api_route("/metrics", surface.metrics, methods=["GET"])
