"""Decode states that wait for another engine: handles that nobody guesses, read once, for a bounded time and in bounded bytes."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Executor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from hypic.v1 import worker_pb2

from services.blob.layout import StateHeader
from services.blob.planes import Plane
from services.blob.tensors import plane_of
from services.common.errors import InvalidRequestError, NotFoundError, OverloadedError, UnavailableError
from services.worker.adapters.byte_budget import ByteBudget
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.readable_states import run_to_end
from services.worker.adapters.served_model import ServedModel
from services.worker.adapters.state_stream import header_message, layer_messages
from services.worker.engine.held import OutgoingPrompt
from services.worker.engine.loop import Engine
from services.worker.engine.requests import HeldEvent
from services.worker.mixers.shapes import PageShape, StateShape

__all__ = ["HeldState", "HeldStates", "HoldLimits"]

_HANDLE_BYTES = 32


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """seconds: the longest that a state waits; num_bytes: of all that wait; fetch_bytes: of layers on their way out."""

    seconds: float
    num_bytes: int
    fetch_bytes: int


@dataclass(slots=True)
class HeldState:
    """One that waits. request_id: the engine's name for it; is_read: somebody has begun to take it."""

    handle: bytes
    request_id: str
    token_ids: tuple[int, ...]
    size_bytes: int
    seconds: float
    is_read: bool = False
    _taken: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def is_taken(self) -> bool:
        """It has been read to its end."""
        return self._taken.done() and self._taken.result()

    async def wait(self) -> None:
        """Until it has been read, or the time is up; what is being read then has as long again."""
        await asyncio.wait([self._taken], timeout=self.seconds)
        if self.is_read:
            await asyncio.wait([self._taken], timeout=self.seconds)

    def end(self, is_taken: bool) -> None:
        """Reading has ended."""
        if not self._taken.done():
            self._taken.set_result(is_taken)


class HeldStates:
    """Lives on one event loop. is_whole: this worker's engine holds the model alone; threads: on which layers are read."""

    def __init__(
        self,
        engine: EngineThread,
        served: ServedModel,
        is_whole: bool,
        limits: HoldLimits,
        metrics: WorkerMetrics,
        threads: Executor,
    ) -> None:
        self._engine = engine
        self._served = served
        self._is_whole = is_whole
        self._limits = limits
        self._metrics = metrics
        self._threads = threads
        self._held: dict[bytes, HeldState] = {}
        self._budget = ByteBudget(limits.fetch_bytes)

    def check(self) -> None:
        """Whether prompts can be held here at all.

        Raises:
            InvalidRequestError: they cannot.
        """
        if not self._is_whole:
            raise InvalidRequestError(
                "hold: this worker's ranks hold shares of a state; hold it on a worker of one rank"
            )
        if any(isinstance(kept, PageShape) and kept.latent for kept in self._served.spec.kept):
            raise InvalidRequestError("hold: this model's attention keeps latents, which no other engine reads yet")

    @contextmanager
    def keep(
        self, request_id: str, token_ids: tuple[int, ...], event: HeldEvent, seconds: float
    ) -> Iterator[HeldState]:
        """Hold a state that the engine has kept, while inside.

        Raises:
            OverloadedError: with the others it is too large.
        """
        waiting = sum(held.size_bytes for held in self._held.values())
        if waiting + event.size_bytes > self._limits.num_bytes:
            self._metrics.held_states.labels("refused").inc()
            raise OverloadedError(
                f"{waiting} bytes of decode states are held, and {event.size_bytes} more pass the limit of"
                f" {self._limits.num_bytes} (HYPIC_WORKER_HELD_BYTES)"
            )
        limit = min(seconds or self._limits.seconds, self._limits.seconds)
        held = HeldState(secrets.token_bytes(_HANDLE_BYTES), request_id, token_ids, event.size_bytes, limit)
        self._held[held.handle] = held
        try:
            yield held
        finally:
            del self._held[held.handle]
            self._metrics.held_states.labels("taken" if held.is_taken else "dropped").inc()

    async def take(self, handle: bytes) -> AsyncGenerator[worker_pb2.Chunk]:
        """The messages of a state, for the first who asks.

        Raises:
            NotFoundError: nothing waits under the handle any more.
            UnavailableError: whoever had it held wants it no more.
        """
        held = self._held.get(handle)
        if held is None or held.is_read:
            raise NotFoundError("no decode state waits under this handle: it was read, given up, or its time was up")
        held.is_read = True
        is_taken, name = False, held.request_id
        try:
            outgoing = await self._engine.acquire(
                lambda engine: engine.held.open(name), lambda engine, _: _close(engine, name)
            )
            if outgoing is None:
                raise NotFoundError("no decode state waits under this handle: it was given up")
            async with aclosing(self._messages(held, outgoing)) as messages:
                async for chunk in messages:
                    yield chunk
            is_taken = True
        finally:
            self._engine.post(lambda engine: _close(engine, name))
            held.end(is_taken)

    async def _messages(self, held: HeldState, outgoing: OutgoingPrompt) -> AsyncGenerator[worker_pb2.Chunk]:
        header = self._header(held)
        yield header_message(header, b"", is_being_computed=False)
        async with self._budget.held(held.size_bytes // max(1, header.num_layers)):
            for layer in range(header.num_layers):
                if self._held.get(held.handle) is not held:
                    raise UnavailableError("the decode state was given up while it was read")
                for chunk in layer_messages(b"", await run_to_end(self._threads, _read, outgoing, layer)):
                    yield chunk

    def _header(self, held: HeldState) -> StateHeader:
        served = self._served
        return StateHeader(
            model_revision=served.revision,
            profile_digest=served.profile_digest,
            token_ids=held.token_ids,
            seam_window=0,
            layers=tuple("linear" if isinstance(kept, StateShape) else "attention" for kept in served.spec.kept),
            encoding={},
        )


def _read(outgoing: OutgoingPrompt, layer: int) -> list[Plane]:
    return [plane_of(layer, name, tensor) for name, tensor in outgoing.read_layer(layer).items()]


def _close(engine: Engine, request_id: str) -> None:
    engine.held.close(request_id)
    engine.wake()
