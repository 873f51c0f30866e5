"""Wires the router and runs it."""

import asyncio
import gc
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import FrameType
from typing import NoReturn

import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from services.common.rpc import cache_channel, worker_channel
from services.common.telemetry import configure_logging, get_logger
from services.common.tracing import configure_tracing
from services.router.adapters.auth import Gate
from services.router.adapters.beside import serve_beside
from services.router.adapters.clients import GrpcDirectory
from services.router.adapters.direct import DirectRoutes
from services.router.adapters.discovery import find_named, find_registered, keep_finding
from services.router.adapters.document_client import GrpcDocuments
from services.router.adapters.gathered_writes import GatheringProtocol
from services.router.adapters.guard_metrics import GuardInstruments
from services.router.adapters.guarded import GuardedRouter
from services.router.adapters.http import Door, Draining, HttpSurface, create_http_app, create_operations_app
from services.router.adapters.http_admin import AdminSurface
from services.router.adapters.http_console import ConsoleSurface
from services.router.adapters.http_documents import DocumentSurface
from services.router.adapters.http_messages import MessageSurface
from services.router.adapters.http_pins import PinSurface
from services.router.adapters.key_file import FileKeys, KeyFileError, NoKeys, SingleKey
from services.router.adapters.metrics import MeteredRouter, RouterMetrics
from services.router.adapters.model_builder import build_model
from services.router.adapters.parse import RequestParser
from services.router.adapters.quotas import BoundedRouter, SheddingRouter
from services.router.adapters.recording import RecordingRouter
from services.router.adapters.store_client import GrpcStore
from services.router.adapters.traced import TracedRouter
from services.router.adapters.vllm_engine import VllmEngine
from services.router.adapters.worker_pool import WorkerPool
from services.router.app import Router, RouterLimits
from services.router.background import Background
from services.router.captures import Capturer
from services.router.choices import ChoosingRouter
from services.router.domain.hedging import HedgePolicy
from services.router.domain.rates import Rates
from services.router.domain.recent import RecentRequests
from services.router.domain.refreshing import RefreshPolicy
from services.router.domain.request import Cold, Refresh
from services.router.domain.shedding import SheddingPolicy
from services.router.domain.tenancy import Keys, Quotas, hash_key
from services.router.guard import GuardPolicy, QualityGuard
from services.router.handover import Handover
from services.router.library import Library, LibraryServices
from services.router.reuse import ReusePolicy, ReuseServices
from services.router.settings import RouterSettings
from services.router.shadows import QuietWorkers, ShadowPolicy, Shadows, TrafficWorkers, Way
from services.router.turns import TurnKeeper

__all__ = ["RouterServer", "bind", "create_app", "create_server", "main", "serve"]


_ADDED_OBJECTS_TO_COLLECT = 50_000
_SHADOW_SECONDS = 60.0
_WAITING_SHADOWS = 8
# Nothing that is sampled is waited for by anybody: where no worker takes it, it is dropped.
_SHADOW_LIMITS = RouterLimits(
    request_timeout_seconds=_SHADOW_SECONDS, worker_wait_seconds=0.0, default_max_tokens=1, keeps_turns=False
)


class RouterServer(uvicorn.Server):
    """A server whose readiness goes as soon as it is asked to end; replies under way are finished."""

    def __init__(self, config: uvicorn.Config, draining: Draining) -> None:
        super().__init__(config)
        self._draining = draining

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called on SIGTERM and SIGINT."""
        self._draining.is_set = True
        super().handle_exit(sig, frame)


def bind(settings: RouterSettings) -> socket.socket:
    """The listening socket; port 0 takes a free one.

    Raises:
        OSError: the address is taken.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    listener.set_inheritable(True)
    return listener


def create_server(settings: RouterSettings) -> RouterServer:
    """A server that is yet to run; setting its `should_exit` ends it gracefully. Call inside the serving loop."""
    draining = Draining()
    config = uvicorn.Config(
        create_app(settings, draining),
        http=GatheringProtocol,
        log_config=None,
        access_log=False,
        # Nothing here looks at a client's address, least of all at one that a header claims.
        proxy_headers=False,
        lifespan="on",
        ssl_certfile=settings.http_tls_cert_file,
        ssl_keyfile=settings.http_tls_key_file,
        ssl_ca_certs=None if settings.http_tls_client_ca_file is None else str(settings.http_tls_client_ca_file),
        ssl_cert_reqs=ssl.CERT_NONE if settings.http_tls_client_ca_file is None else ssl.CERT_REQUIRED,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_seconds)),
    )
    return RouterServer(config, draining)


async def serve(settings: RouterSettings, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then finish the replies under way."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.http_tls_cert_file is None else "https"
    get_logger().info("listening", address=f"{scheme}://{host}:{port}")
    await create_server(settings).serve(sockets=[listener])


def create_app(settings: RouterSettings, draining: Draining) -> ASGIApp:
    """The application; its channels open with its lifespan, in the loop that serves it."""
    channel = cache_channel(settings.cache_address, settings.identity)
    pool = WorkerPool(
        partial(build_model, memo_bytes=settings.tokenizer_memo_bytes),
        settings.worker_silence_seconds,
        partial(worker_channel, identity=settings.identity),
    )
    find = find_named(settings.worker_places) if settings.workers else find_registered(channel)
    background = Background(settings.max_background_captures)
    policy = _reuse_policy(settings)
    directory = GrpcDirectory(channel)
    metrics = RouterMetrics(CollectorRegistry(), pool.states, settings.tenant_groups)
    guard = QualityGuard(_guard_policy(settings), GuardInstruments(metrics.registry))
    way = Way()
    workers = TrafficWorkers(pool, way)
    turns = TurnKeeper(pool, metrics, settings.cache_timeout_seconds)
    capturer = Capturer(workers, _hedge_policy(settings), metrics)
    services = ReuseServices(directory, workers, capturer, background, policy, turns)
    gate = Gate(_keys(settings), _usual_quotas(settings))
    limits = RouterLimits(
        settings.request_timeout_seconds,
        settings.worker_wait_seconds,
        settings.default_max_tokens,
        settings.keep_turns,
    )
    engines = _engines(settings, pool)
    router = Router(pool, services, limits, Handover(pool, engines) if engines else None)
    recent = RecentRequests(settings.console_requests)
    store = GrpcStore(channel, settings.cache_timeout_seconds)
    shedding = SheddingPolicy(settings.max_queue_seconds, settings.max_requests_per_worker)
    quiet = QuietWorkers(pool, way, settings.guard_busy_requests)
    behind = ReuseServices(
        directory, quiet, Capturer(quiet, _hedge_policy(settings), metrics), background, policy, turns
    )
    shadows = Shadows(Router(pool, behind, _SHADOW_LIMITS).generate, quiet, guard, _shadow_policy(settings))
    answer = router.generate
    if settings.guard_share:
        answer = GuardedRouter(answer, pool, guard, shadows).generate
    answering = SheddingRouter(ChoosingRouter(answer), pool.views, shedding)
    bounded = BoundedRouter(answering)
    generator = TracedRouter(MeteredRouter(RecordingRouter(bounded, recent), metrics))
    surface = HttpSurface(
        generator,
        pool,
        RequestParser(settings.completions_separator, settings.max_parts),
        metrics,
        draining,
        Door(gate, settings.max_body_bytes),
        policy.refresh.refresh,
    )
    documents = GrpcDocuments(channel, settings.cache_timeout_seconds)
    library = Library(pool, LibraryServices(documents, documents, directory, pool, capturer, background, policy))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        finding = asyncio.create_task(keep_finding(find, pool.update, settings.worker_refresh_seconds))
        try:
            async with serve_beside(create_operations_app(surface), settings.operations_address):
                yield
        finally:
            finding.cancel()
            with suppress(asyncio.CancelledError):
                await finding
            await shadows.close()
            await background.close(settings.cache_timeout_seconds)
            for engine in engines:
                await engine.close()
            await pool.close()
            await channel.close()

    pages = (
        MessageSurface(generator, pool, metrics, Door(gate, settings.max_body_bytes), settings.max_parts).routes(),
        DocumentSurface(library, gate, settings.max_body_bytes).routes(),
        PinSurface(library, gate, settings.max_body_bytes).routes(),
        AdminSurface(store, guard, gate).routes(),
        ConsoleSurface(gate, recent, pool, store).routes(),
    )
    app = create_http_app(
        surface,
        pages,
        lifespan,
        has_metrics=not settings.operations_address,
        max_header_bytes=settings.max_header_bytes,
    )
    return app if settings.otlp_endpoint else DirectRoutes(app, surface.endpoints(), settings.max_header_bytes)


def _engines(settings: RouterSettings, pool: WorkerPool) -> list[VllmEngine]:
    key = settings.vllm_api_key.get_secret_value()
    return [
        VllmEngine(url, lambda: settings.vllm_model or pool.require().info.name, key) for url in settings.engine_urls
    ]


def _keys(settings: RouterSettings) -> Keys:
    if settings.api_keys_file:
        return FileKeys(settings.api_keys_file)
    if settings.has_single_key:
        return SingleKey(hash_key(settings.api_key.get_secret_value()), settings.tenant)
    get_logger().warning("authentication_is_off", host=settings.host, tenant=settings.tenant)
    return NoKeys(settings.tenant)


def main() -> None:
    """`hypic router`: exits with 0 after a graceful end, with 1 when the address is taken."""
    settings = RouterSettings.load_or_exit()
    configure_logging("router", settings.log_level, settings.log_format)
    configure_tracing("router", "HYPIC_ROUTER_OTLP_ENDPOINT", settings.otlp_endpoint)
    # Before uvicorn takes signals there is nothing to finish; once it has ended it raises them again, and all is done.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    # What a request leaves is freed as it ends; looking through all that lives, as often as by default, is a tenth of the work.
    gc.freeze()
    gc.set_threshold(_ADDED_OBJECTS_TO_COLLECT)
    try:
        listener = bind(settings)
    except OSError as error:
        get_logger().error("cannot_listen", host=settings.host, port=settings.port, error=str(error))
        raise SystemExit(1) from error
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, listener))
    except KeyFileError as error:
        sys.stderr.write(f"hypic: settings: HYPIC_ROUTER_API_KEYS_FILE: {error}\n")
        raise SystemExit(2) from error


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def _usual_quotas(settings: RouterSettings) -> Quotas:
    rates = Rates(settings.tenant_requests_per_minute, settings.tenant_tokens_per_minute)
    return Quotas(max_requests_in_flight=settings.tenant_max_requests_in_flight, rates=rates)


def _reuse_policy(settings: RouterSettings) -> ReusePolicy:
    return ReusePolicy(
        lease_seconds=settings.lease_seconds,
        cache_timeout_seconds=settings.cache_timeout_seconds,
        capture_timeout_seconds=settings.capture_timeout_seconds,
        pending_wait_seconds=settings.pending_wait_seconds,
        cold=Cold(settings.cold),
        refresh=RefreshPolicy(
            Refresh(None if settings.refresh == "auto" else int(settings.refresh)), settings.ttft_budget_seconds
        ),
    )


def _guard_policy(settings: RouterSettings) -> GuardPolicy:
    return GuardPolicy(settings.guard_share, settings.guard_budget_nats, settings.guard_budgets, settings.tenant_groups)


def _shadow_policy(settings: RouterSettings) -> ShadowPolicy:
    return ShadowPolicy(settings.guard_running, _WAITING_SHADOWS, _SHADOW_SECONDS, settings.guard_busy_requests)


def _hedge_policy(settings: RouterSettings) -> HedgePolicy:
    return HedgePolicy(factor=settings.hedge_factor, slack_seconds=settings.hedge_slack_seconds)
