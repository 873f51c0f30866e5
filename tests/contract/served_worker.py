"""A worker's engine over a tiny model, with tiers and without a cache service; states enter it through the engine."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.common.content import HASH_BYTES
from services.worker.adapters.blob_tiers import BlobTiers
from services.worker.adapters.byte_budget import ByteBudget
from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.peer_states import PeerStates
from services.worker.adapters.served_model import ServedModel, read_served_model
from services.worker.adapters.tiered_states import TieredStates
from services.worker.adapters.transfers import Fetched, Transfers, WantedState
from services.worker.engine.admission import ARRIVING_TIER
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    FetchEvent,
    GenerateEvent,
    GenerateRequest,
    PrefilledEvent,
    PromptPart,
    Serving,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.settings import WorkerSettings
from services.worker.tiers.port import BlobStore
from tests.e2e.stack.checkpoint import write_random_checkpoint
from tests.exactness.rig import draw_ids

__all__ = ["CALL_SECONDS", "DEMO", "IDS", "KEY", "EngineWithTiers", "run_engine"]

KEY = bytes(range(HASH_BYTES))
IDS = tuple(token % 64 for token in draw_ids(90, 5))
CALL_SECONDS = 30.0
DEMO = Path(__file__).parents[2] / "models" / "demo"


class ListedCopies:
    """A directory that lists whatever the worker has; see `Copies`."""

    def __init__(self) -> None:
        self.copied: dict[bytes, tuple[str, bytes]] = {}

    def is_published(self, key: bytes) -> bool:
        return True

    async def publish_copy(self, key: bytes, holder_id: str, receipt: bytes) -> str:
        self.copied[key] = (holder_id, receipt)
        return ""

    async def drop_unpublished(self, keys: Iterable[bytes]) -> None:
        """Nothing is."""

    def note_change(self) -> None:
        """Nobody listens."""


@dataclass(frozen=True, slots=True)
class EngineWithTiers:
    """What `run_engine` started."""

    engine: EngineThread
    served: ServedModel
    tiers: TieredStates
    transfers: Transfers
    registry: CollectorRegistry
    metrics: WorkerMetrics
    copies: ListedCopies

    async def capture(self, key: bytes = KEY, token_ids: tuple[int, ...] = IDS) -> None:
        """Store a segment under a key."""
        done: asyncio.Queue[CaptureEvent] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(event: CaptureEvent) -> None:
            loop.call_soon_threadsafe(done.put_nowait, event)

        job = CaptureJob("test", (CaptureSegment(key, token_ids),), sink)
        await self.engine.call(lambda engine: engine.submit_capture(job))
        async with asyncio.timeout(CALL_SECONDS):
            assert (await done.get()).reason == ""

    async def fetch(self, key: bytes, wanted: WantedState) -> Fetched | None:
        """Combine a prompt that uses a state: whence it came, or why not; None where there was no way to it."""
        events: asyncio.Queue[GenerateEvent] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(event: GenerateEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        self.transfers.use([key])
        name = uuid.uuid4().hex
        try:
            planned = await self.transfers.plan({key: wanted})
            if planned.get(key, "none"):
                return Fetched(reason=planned[key]) if key in planned else None
            parts = (PromptPart(wanted.token_ids, Serving.SEGMENT, key, is_fetched=True), PromptPart((1, 2)))
            request = GenerateRequest(name, parts, SamplingOptions(1), sink)
            await self.engine.call(lambda engine: engine.submit(request))
            while not isinstance(event := await events.get(), PrefilledEvent):
                if isinstance(event, FetchEvent):
                    self.transfers.start(event, wanted)
            part = event.parts[0]
            if part.tier == ARRIVING_TIER:
                # The prompt needs the layers; the store has the state a moment later.
                async with asyncio.timeout(CALL_SECONDS):
                    while not await self.holds(key):  # noqa: ASYNC110 # the engine's thread stores it
                        await asyncio.sleep(0.002)
                return self.transfers.describe(key)
            return Fetched(tier=part.tier, reason=part.reason)
        finally:
            self.engine.post(lambda engine: engine.cancel(name))
            await asyncio.shield(self.transfers.leave([key]))

    async def holds(self, key: bytes = KEY) -> bool:
        """Whether the engine's memory holds a state."""
        return await self.engine.call(lambda engine: key in engine.context.store)

    async def drop(self, key: bytes = KEY) -> None:
        """Forget a state in the engine's memory alone."""
        await self.engine.call(lambda engine: engine.context.store.drop(key))

    async def free_pages(self) -> int:
        """Pages nobody holds, behind every command so far."""
        return await self.engine.call(lambda engine: engine.context.pages.num_free)

    def count(self, name: str, tier: str) -> float:
        """A counter of a tier."""
        return self.registry.get_sample_value(f"hypic_worker_{name}_total", {"tier": tier}) or 0.0


@asynccontextmanager
async def run_engine(
    directory: Path,
    stores: Sequence[BlobStore],
    fetch_seconds: float = CALL_SECONDS,
    profile: str = "",
    shares_memory: bool = False,
) -> AsyncIterator[EngineWithTiers]:
    """An engine over a checkpoint in `directory`, written where it is not there; stores and engine must add up at the end."""
    if not (directory / "config.json").exists():
        write_random_checkpoint(directory, DEMO)
    if profile:
        (directory / "profile.toml").write_text(profile)
    # Commands are obeyed between any two layers.
    settings = WorkerSettings(checkpoint=directory, page_bytes=16 << 20, state_bytes=64 << 20, layer_tokens=1)
    served = read_served_model(settings)
    engine = EngineThread(lambda: build_engine(settings, served), lambda error: None)
    await engine.start()
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    peers = PeerStates(served, "127.0.0.1:1", ByteBudget(1 << 26), shares_memory)
    tiers = TieredStates(engine, served, BlobTiers(served, stores, metrics))
    copies = ListedCopies()
    transfers = Transfers(engine, served, tiers, peers, copies, metrics, fetch_seconds)
    yield EngineWithTiers(engine, served, tiers, transfers, registry, metrics, copies)
    await transfers.close()
    await engine.call(lambda running: running.check_integrity())
    for store in stores:
        store.check_integrity()
    tiers.close()
    engine.stop()
