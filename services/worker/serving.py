"""Wires a worker: model, engine thread, cache client, gRPC server; and ends it in order."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import grpc
from hypic.v1 import cache_pb2
from hypic.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from prometheus_client import CollectorRegistry

from services.common.rpc import HealthSwitch, cache_channel, create_server, serve_health, worker_channel
from services.common.telemetry import get_logger, serve_metrics
from services.worker.adapters.blob_tiers import BlobTiers
from services.worker.adapters.byte_budget import ByteBudget
from services.worker.adapters.cache_client import CacheClient, WorkerIdentity
from services.worker.adapters.description import WorkerPlace
from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.followers import Followers
from services.worker.adapters.held_states import HeldStates, HoldLimits
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.peer_states import PeerStates
from services.worker.adapters.residency import Residency
from services.worker.adapters.served_model import ServedModel, read_served_model
from services.worker.adapters.tier_builder import TierError, build_stores
from services.worker.adapters.tiered_states import TieredStates
from services.worker.adapters.transfers import Transfers
from services.worker.app import WorkerService
from services.worker.engine.warm_up import WarmUp
from services.worker.mixers.share import Share, SplitError
from services.worker.models.errors import CheckpointError
from services.worker.profile import ProfileError
from services.worker.settings import WorkerSettings
from services.worker.tiers.port import BlobStore

__all__ = ["serve"]

_GAUGE_SECONDS = 1.0
# For states that are on their way to other workers when everything else has ended.
_LEAVING_SECONDS = 1.0
# For calls under way to hear of the end of a group that has lost a rank.
_LAST_SECONDS = 5.0


async def serve(settings: WorkerSettings) -> int:
    """Serve until a signal, the engine's death or the loss of a rank; returns the process's exit status."""
    ended = _Ending()
    try:
        served = read_served_model(settings)
        stores = build_stores(settings)
        async with _started_followers(settings, served, ended) as followers:
            return await _serve(settings, served, stores, followers, ended)
    except (CheckpointError, ProfileError, SplitError, TierError) as error:
        sys.stderr.write(f"hypic worker: {error}\n")
        return 2


@asynccontextmanager
async def _started_followers(
    settings: WorkerSettings, served: ServedModel, ended: "_Ending"
) -> AsyncIterator[Followers | None]:
    """The other ranks, whose first loss ends the process; None where there are none.

    Raises:
        SplitError: the model cannot be split over so many.
    """
    if settings.tensor_parallel == 1:
        yield None
        return
    served.spec.split(Share(0, settings.tensor_parallel))
    followers = await Followers.start(settings.tensor_parallel, served.revision)
    ended.watch(followers)
    try:
        yield followers
    finally:
        ended.unwatch()
        await followers.stop()


async def _serve(
    settings: WorkerSettings,
    served: ServedModel,
    stores: Sequence[BlobStore],
    followers: Followers | None,
    ended: "_Ending",
) -> int:
    place, lead = (None, None) if followers is None else (followers.place, followers.lead)
    warmed: list[WarmUp] = []
    engine = EngineThread(lambda: build_engine(settings, served, place, warmed.append), ended.on_engine_death, lead)
    if not await ended.outlives(engine.start()):
        return await ended.wait()
    channel = cache_channel(settings.cache_address, settings.identity)
    worker = _assemble(settings, served, engine, channel, stores)
    for done in warmed:
        worker.residency.tiers.policy.learn(done.combines, done.captures)
    num_kept = await worker.residency.take_back()
    health = HealthSwitch()
    server, port = await create_server(
        [lambda server: add_WorkerServiceServicer_to_server(worker.service, server)],
        settings.listen_address,
        health,
        settings.tls,
    )
    probed = await serve_health(settings.health_address, health)
    serve_metrics(worker.registry, settings.metrics_host, settings.metrics_port)
    tasks = [asyncio.create_task(worker.residency.keep_reporting()), asyncio.create_task(worker.keep_gauges())]
    await health.set_ready(True)
    get_logger().info("worker_ready", port=port, model=served.name, profile=served.profile_digest[:12], states=num_kept)
    if served.calibration.card is None:
        get_logger().warning("uncalibrated", model=served.name, reason=served.calibration.refusal)
    status = await ended.wait()
    get_logger().info("worker_draining", seconds=settings.drain_seconds)
    await health.set_ready(False)
    if status == 0:
        await worker.service.drain(settings.drain_seconds)
    await server.stop(_LEAVING_SECONDS if status == 0 else 0.0)
    if probed is not None:
        await probed.stop(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if status == 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_seconds):
                await worker.residency.settle()
        await worker.transfers.close()
        worker.residency.tiers.close()
        engine.stop()
    await channel.close()
    return status


class _Ending:
    """Waits for whatever ends the process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = self._loop.create_future()
        self._watch: asyncio.Task[None] | None = None
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signal_number, self._end, 0)

    def watch(self, followers: Followers) -> None:
        """A group that has lost a rank is better restarted; a fault of the checkpoint is no better the next time."""

        async def watch() -> None:
            lost = await followers.lost()
            status = 2 if lost.status == 2 else 1
            # Whoever waits for the engine may wait for a device on which the lost rank will never do its part.
            last = threading.Timer(_LAST_SECONDS, os._exit, [status])
            last.daemon = True
            last.start()
            self._end(status)

        self._watch = asyncio.create_task(watch())

    def unwatch(self) -> None:
        """From now on ranks may end."""
        if self._watch is not None:
            self._watch.cancel()

    async def outlives(self, starting: Awaitable[None]) -> bool:
        """Wait for a start; whether it came before the loss of a rank. Raises what the start raises."""
        waits: list[asyncio.Future[None]] = [asyncio.ensure_future(starting)]
        if self._watch is not None:
            waits.append(self._watch)
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if waits[0] not in done:
            return False
        waits[0].result()
        return True

    def on_engine_death(self, _error: BaseException) -> None:
        """May be called from any thread: a worker without an engine is better restarted."""
        self._loop.call_soon_threadsafe(self._end, 1)

    async def wait(self) -> int:
        """The exit status."""
        return await self._status

    def _end(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)


@dataclass(frozen=True, slots=True)
class _Worker:
    service: WorkerService
    residency: Residency
    transfers: Transfers
    engine: EngineThread
    tiers: BlobTiers
    metrics: WorkerMetrics
    registry: CollectorRegistry

    async def keep_gauges(self) -> None:
        """Refresh gauges for ever."""
        while True:
            await self.engine.call(self.metrics.read)
            await self.residency.myself.refresh()
            self.metrics.read_tiers(self.tiers.used_bytes())
            await asyncio.sleep(_GAUGE_SECONDS)


def _assemble(
    settings: WorkerSettings,
    served: ServedModel,
    engine: EngineThread,
    channel: grpc.aio.Channel,
    stores: Sequence[BlobStore],
) -> _Worker:
    tier = "host" if settings.device == "cpu" else "gpu"
    identity = WorkerIdentity(
        settings.worker_id, settings.reached_at, served.revision, served.profile_digest, tier, _roles(settings)
    )
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    tiers = BlobTiers(served, stores, metrics)
    states = TieredStates(engine, served, tiers)
    residency = Residency(engine, CacheClient(channel, identity), tier, states)
    connect = partial(worker_channel, identity=settings.identity)
    budget = ByteBudget(settings.fetch_bytes)
    peers = PeerStates(served, settings.reached_at, budget, settings.shares_memory, connect)
    transfers = Transfers(engine, served, states, peers, residency, metrics, settings.fetch_seconds)
    place = WorkerPlace(
        settings.worker_id,
        settings.can_capture,
        settings.can_combine,
        settings.min_body,
        settings.fetch_bytes,
        settings.tensor_parallel == 1,
        settings.turn_seconds,
    )
    limits = HoldLimits(settings.held_seconds, settings.held_bytes, settings.fetch_bytes)
    held = HeldStates(engine, served, place.moves_states, limits, metrics, states.threads)
    service = WorkerService(served, place, engine, residency, transfers, held, metrics)
    return _Worker(service, residency, transfers, engine, tiers, metrics, registry)


def _roles(settings: WorkerSettings) -> tuple[cache_pb2.WorkerRole.ValueType, ...]:
    has = {
        cache_pb2.WORKER_ROLE_PREFILL: settings.can_capture,
        cache_pb2.WORKER_ROLE_COMBINE: settings.can_combine,
    }
    return tuple(role for role, is_own in has.items() if is_own)
