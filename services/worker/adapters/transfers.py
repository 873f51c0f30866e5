"""States on their way into the engine's memory, for prompts that use them layer by layer as they come."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.common.telemetry import get_logger
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.peer_states import FetchLimits, PeerStates, Source
from services.worker.adapters.served_model import ServedModel
from services.worker.adapters.state_moves import Move, Moved, PeerMove, TierMove
from services.worker.adapters.tiered_states import TieredStates
from services.worker.engine.loop import Engine
from services.worker.engine.requests import FetchEvent
from services.worker.tiers.speeds import OTHER_HOST, SAME_HOST

__all__ = ["Copies", "Fetched", "Transfers", "WantedState"]


@dataclass(frozen=True, slots=True)
class WantedState:
    """A state that a prompt uses. sources: other workers that hold it, or compute it now, for `wait_seconds` at most."""

    token_ids: tuple[int, ...]
    sources: tuple[Source, ...] = ()
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of a state that was to come. tier: whence it came; reason: why it did not; source: from which worker."""

    tier: str = ""
    reason: str = ""
    source: str = ""
    seconds: float = field(default=0.0, compare=False)


class Copies(Protocol):
    """What the directory lists of this worker; see `Residency`."""

    def is_published(self, key: bytes) -> bool:
        """Whether a copy is listed."""
        ...

    async def publish_copy(self, key: bytes, holder_id: str, receipt: bytes) -> str:
        """List a copy that came from another worker."""
        ...

    async def drop_unpublished(self, keys: Iterable[bytes]) -> None:
        """Drop what is not listed from the engine's memory."""
        ...

    def note_change(self) -> None:
        """A listed copy may be gone."""
        ...


@dataclass(slots=True)
class _Transfer:
    """One state on its way. way, source: that it takes now."""

    event: FetchEvent
    began_at: float = field(default_factory=time.monotonic)
    way: str = ""
    source: str = ""
    seconds: float = 0.0
    task: "asyncio.Task[None] | None" = None

    def describe(self) -> Fetched:
        """As it is now."""
        return Fetched(self.way, "", self.source, self.seconds or time.monotonic() - self.began_at)


class Transfers:
    """Lives on the event loop. A prompt names what it uses from `use` to `leave`; what nobody uses any more is not brought on.

    fetch_seconds: no prompt waits longer for a state, beside the time that it takes to compute.
    """

    def __init__(
        self,
        engine: EngineThread,
        served: ServedModel,
        states: TieredStates,
        peers: PeerStates,
        copies: Copies,
        metrics: WorkerMetrics,
        fetch_seconds: float,
    ) -> None:
        self._engine = engine
        self._served = served
        self._states = states
        self._tiers = states.tiers
        self._peers = peers
        self._copies = copies
        self._metrics = metrics
        self._fetch_seconds = fetch_seconds
        self._transfers: dict[bytes, _Transfer] = {}
        self._users: Counter[bytes] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    def use(self, keys: Iterable[bytes]) -> None:
        """A prompt uses these states until it calls `leave`."""
        self._users.update(list(keys))

    async def leave(self, keys: Collection[bytes]) -> None:
        """It does not any more. What came from another worker and is not published here goes with the last prompt."""
        self._users.subtract(list(keys))
        unused = [key for key in keys if self._users[key] <= 0]
        for key in unused:
            del self._users[key]
        left = [self._transfers.pop(key) for key in unused if key in self._transfers]
        for transfer in left:
            if transfer.task is not None and not transfer.event.incoming.is_present:
                transfer.task.cancel()
        ended = [transfer.event.key for transfer in left if transfer.task is None or transfer.task.done()]
        await self._copies.drop_unpublished(ended)

    async def plan(self, wanted: Mapping[bytes, WantedState]) -> dict[bytes, str]:
        """Of the states that could be brought from elsewhere, why each is not to be; empty where it is."""
        ways = {key: self._ways(key, one) for key, one in wanted.items()}
        asked = [key for key, own in ways.items() if own]
        if not asked:
            return {}
        here = await self._engine.call(lambda engine: {key for key in asked if key in engine.context.store})
        return {
            key: "" if key in here or key in self._transfers else self._refusal(ways[key], wanted[key]) for key in asked
        }

    def start(self, event: FetchEvent, wanted: WantedState, most_seconds: float = math.inf) -> None:
        """Bring a state for which the engine has reserved room, in so much time."""
        transfer = _Transfer(event)
        self._transfers[event.key] = transfer
        # Each of those that may still compute it gets its time.
        tries = len(wanted.sources) if wanted.wait_seconds else 1
        seconds = min(most_seconds, tries * (self._fetch_seconds + wanted.wait_seconds))
        transfer.task = asyncio.create_task(self._run(transfer, wanted, seconds))
        self._closing.add(transfer.task)
        transfer.task.add_done_callback(self._closing.discard)

    def describe(self, key: bytes) -> Fetched | None:
        """Whence a state comes or came, while a prompt uses it."""
        transfer = self._transfers.get(key)
        return None if transfer is None else transfer.describe()

    async def close(self) -> None:
        """End everything that is on its way."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._peers.close()

    def _ways(self, key: bytes, wanted: WantedState) -> dict[str, int]:
        """Tiers that the state may come from, other workers' memory among them, with the bytes that would."""
        ways = self._tiers.sizes(key) if self._copies.is_published(key) else {}
        estimate = self._served.state_bytes + len(wanted.token_ids) * self._served.token_bytes
        return ways | {self._peers.way(source): estimate for source in wanted.sources}

    def _refusal(self, ways: dict[str, int], wanted: WantedState) -> str:
        if wanted.wait_seconds:
            # Somebody computes it for this prompt.
            return ""
        body = len(wanted.token_ids) - self._served.profile.seam.tokens(len(wanted.token_ids))
        return "" if self._states.policy.choose(ways, body) else "fetch_slower"

    async def _run(self, transfer: _Transfer, wanted: WantedState, seconds: float) -> None:
        """Whatever happens on the way, the engine hears of an end once."""
        event, policy = transfer.event, self._states.policy
        reason = "fetch_failed"
        try:
            async with asyncio.timeout(seconds):
                reason, moved = await self._bring(transfer, wanted)
        except TimeoutError:
            reason, moved = "fetch_timeout", None
            if transfer.way:
                policy.speed(transfer.way).observe_timeout(seconds)
        except asyncio.CancelledError:
            self._fail(event, "cancelled")
            raise
        except Exception as error:
            get_logger().warning("fetch_failed", key=event.key.hex(), error=str(error))
            moved = None
        transfer.seconds = time.monotonic() - transfer.began_at
        if moved is None:
            self._fail(event, reason)
            self._forget(transfer)
            return
        if moved.is_measure:
            policy.speed(transfer.way).observe(moved.latency_seconds, moved.seconds, moved.num_bytes)
        self._metrics.on_fetched(transfer.way, transfer.seconds, moved.num_bytes)
        await self._arrive(event, moved)
        if self._transfers.get(event.key) is not transfer:
            # Nobody uses it any more; what the directory lists is of use to the next who asks.
            await self._copies.drop_unpublished([event.key])

    async def _arrive(self, event: FetchEvent, moved: Moved) -> None:
        finish = self._engine.call(lambda engine: engine.finish_arrival(event.key, event.incoming))
        await asyncio.shield(asyncio.ensure_future(finish))
        if moved.source and moved.receipt:
            await self._copies.publish_copy(event.key, moved.source, moved.receipt)
        if not moved.source:
            # What has been dropped on the way must not come back with it.
            await self._copies.drop_unpublished([event.key])

    def _fail(self, event: FetchEvent, reason: str) -> None:
        self._engine.post(lambda engine: engine.fail_arrival(event.key, event.incoming, reason))

    def _forget(self, transfer: _Transfer) -> None:
        if self._transfers.get(transfer.event.key) is transfer:
            del self._transfers[transfer.event.key]

    async def _bring(self, transfer: _Transfer, wanted: WantedState) -> tuple[str, Moved | None]:
        """By the quickest way; where that fails by the next, which brings what has not come yet."""
        key, incoming = transfer.event.key, transfer.event.incoming
        reason = "blob_missing"
        ways = self._ways(key, wanted)
        while ways:
            transfer.way = self._states.policy.quickest(ways)
            del ways[transfer.way]
            for move in self._moves(transfer.way, wanted):
                transfer.source = move.source.worker_id if isinstance(move, PeerMove) else ""
                try:
                    return "", await move.run(key, incoming, self._wake_engine)
                except Exception as error:
                    self._metrics.failed_fetches.labels(move.way).inc()
                    reason = await move.give_up(key, error)
                    self._copies.note_change()
        return reason, None

    def _moves(self, way: str, wanted: WantedState) -> Iterator[Move]:
        if way not in (SAME_HOST, OTHER_HOST):
            yield TierMove(way, self._served, self._tiers, self._states.threads)
            return
        limits = FetchLimits(wanted.wait_seconds, self._fetch_seconds, self._fetch_seconds + wanted.wait_seconds)
        for source in wanted.sources:
            if self._peers.way(source) == way:
                yield PeerMove(way, source, limits, self._peers, self._states.threads)

    def _wake_engine(self) -> None:
        self._engine.post(Engine.wake)
