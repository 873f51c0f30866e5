"""Wires the cache service and runs it until SIGTERM."""

import asyncio
import contextlib
import gc
import itertools
import secrets
import signal
import sys
from dataclasses import dataclass

import grpc
import uvloop
from hypic.v1 import cache_pb2_grpc
from prometheus_client import CollectorRegistry

from services.cache.adapters.journal import JournalFile
from services.cache.adapters.memory import MemoryDirectory
from services.cache.adapters.metered import MeteredDirectory
from services.cache.app import CacheServicer
from services.cache.domain.cache import SegmentCache
from services.cache.domain.directory import Directory
from services.cache.domain.documents import DocumentRegistry
from services.cache.domain.errors import DirectoryUnavailableError, JournalError
from services.cache.domain.pins import Pins
from services.cache.settings import CacheSettings
from services.common.rpc import HealthSwitch, create_server, serve_health
from services.common.telemetry import configure_logging, get_logger, serve_metrics
from services.common.tracing import configure_tracing

__all__ = ["CacheProcess", "create_directory", "main", "run", "serve", "start"]

_WATCH_SECONDS = 1.0
_CANCEL_SECONDS = 0.2
_ROUNDS_TO_RECONCILE = 30
# What lives here are tables, which hold no cycles. Python's collector looks for some whenever 700 objects have been added to
# them, at 2 to 5 ms a time in which no plan is answered, and now and then through all of them, at 0.2 s with 100,000 entries.
_ADDED_OBJECTS_TO_COLLECT = 100_000


@dataclass(frozen=True, slots=True)
class CacheProcess:
    """A running cache service."""

    address: str
    server: grpc.aio.Server
    servicer: CacheServicer
    directory: Directory
    health: HealthSwitch
    watch: "asyncio.Task[None]"
    probed: grpc.aio.Server | None = None

    async def stop(self, grace_seconds: float) -> None:
        """Readiness off, let running calls end, give up connections."""
        while not self.watch.done():
            # Python 3.11 lets a call to Redis swallow the cancellation that meets its end.
            self.watch.cancel()
            await asyncio.wait([self.watch], timeout=_CANCEL_SECONDS)
        await self.health.set_ready(False)
        self.servicer.drain()
        await self.server.stop(grace_seconds)
        if self.probed is not None:
            await self.probed.stop(0)
        await self.directory.close()


def create_directory(settings: CacheSettings, secret: bytes) -> Directory:
    """The configured adapter. Redis is imported only where it is used.

    Raises:
        JournalError: the journal of an in-memory directory cannot be used.
    """
    if settings.directory == "memory":
        journal = JournalFile(settings.journal_file, secret) if settings.journal_file else None
        return MemoryDirectory(settings.limits(), journal=journal)
    from services.cache.adapters.redis_directory import RedisAddress, RedisDirectory

    address = RedisAddress(
        settings.redis_url,
        settings.redis_prefix,
        settings.redis_username,
        settings.redis_password.get_secret_value(),
        settings.redis_ca_file,
    )
    return RedisDirectory(address, settings.limits())


async def start(settings: CacheSettings, registry: CollectorRegistry) -> CacheProcess:
    """A listening service; ready as soon as its directory answers.

    Raises:
        RuntimeError: the address cannot be bound.
        JournalError: the journal cannot be used.
    """
    secret = settings.secret.get_secret_value().encode() if settings.secret else secrets.token_bytes(32)
    directory = MeteredDirectory(create_directory(settings, secret), registry, settings.budget_bytes)
    cache = SegmentCache(directory, secret, settings.lease_seconds)
    servicer = CacheServicer(
        cache, DocumentRegistry(directory, secret), Pins(directory, secret), settings.worker_ttl_seconds
    )
    health = HealthSwitch()
    server, port = await create_server(
        [lambda server: cache_pb2_grpc.add_CacheServiceServicer_to_server(servicer, server)],
        settings.listen_address,
        health,
        settings.tls,
    )
    probed = await serve_health(settings.health_address, health)
    ready = await _follow(directory, health)
    watch = asyncio.create_task(_watch(directory, health, ready))
    host = settings.listen_address.rpartition(":")[0]
    return CacheProcess(f"{host}:{port}", server, servicer, directory, health, watch, probed)


async def _watch(directory: Directory, health: HealthSwitch, ready: bool) -> None:
    """Let readiness and gauges follow the directory, and budgets be kept that were lowered."""
    if not ready:
        get_logger().warning("directory_unreachable")
    for round_number in itertools.count():
        if round_number % _ROUNDS_TO_RECONCILE == 0:
            with contextlib.suppress(DirectoryUnavailableError):
                await directory.reconcile()
        await asyncio.sleep(_WATCH_SECONDS)
        was_ready, ready = ready, await _follow(directory, health)
        if ready != was_ready:
            get_logger().warning("directory_reachable" if ready else "directory_unreachable")


async def _follow(directory: Directory, health: HealthSwitch) -> bool:
    try:
        await directory.usage()
        ready = True
    except DirectoryUnavailableError:
        ready = False
    await health.set_ready(ready)
    return ready


async def serve(settings: CacheSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    registry = CollectorRegistry()
    process = await start(settings, registry)
    serve_metrics(registry, settings.metrics_host, settings.metrics_port)
    get_logger().info("listening", address=process.address, directory=settings.directory)
    await stop.wait()
    get_logger().info("draining", grace_seconds=settings.grace_seconds)
    await process.stop(settings.grace_seconds)
    get_logger().info("stopped")


def run(settings: CacheSettings) -> None:
    """Serve in a new event loop; returns after a drained stop."""
    configure_logging("cache", settings.log_level, settings.log_format)
    configure_tracing("cache", "HYPIC_CACHE_OTLP_ENDPOINT", settings.otlp_endpoint)
    gc.set_threshold(_ADDED_OBJECTS_TO_COLLECT)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except JournalError as error:
        sys.stderr.write(f"hypic: HYPIC_CACHE_JOURNAL_FILE: {error}\n")
        raise SystemExit(2) from error


def main() -> None:
    """Entry point of `hypic cache`: settings from the environment."""
    run(CacheSettings.load_or_exit())
