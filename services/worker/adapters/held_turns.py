"""States behind replies that have ended, for the moment in which the router decides whether they are of use."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypic.v1 import worker_pb2

from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.residency import Residency
from services.worker.engine.commands import Cancel, Drop, Rename
from services.worker.engine.requests import GenerateEvent, TurnHeldEvent

__all__ = ["HeldTurns", "held_key_of"]

NOT_HELD = "not_held"


def held_key_of(call_id: str) -> bytes:
    """The key under which the state of a call is held; call ids are random."""
    return call_id.encode()


@dataclass(slots=True)
class _Hold:
    """size: once the state is there, its bytes, or 0; over: somebody has decided."""

    size: asyncio.Future[int]
    over: asyncio.Event = field(default_factory=asyncio.Event)


class HeldTurns:
    """Holds states in the engine's store, where prompts that need room evict them, and no longer than so many seconds.

    Whatever becomes of the router, each is kept under a published key or dropped.
    """

    def __init__(self, engine: EngineThread, residency: Residency, seconds: float) -> None:
        self._engine = engine
        self._residency = residency
        self._seconds = seconds
        self._holds: dict[bytes, _Hold] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def adopt(self, call_id: str, events: "asyncio.Queue[GenerateEvent]") -> bytes:
        """Take over a call whose reply has ended and whose `TurnHeldEvent` is to come; the key under which its state is held."""
        key = held_key_of(call_id)
        hold = self._holds[key] = _Hold(asyncio.get_running_loop().create_future())
        task = asyncio.create_task(self._hold(call_id, hold, events))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return key

    async def keep(self, held_key: bytes, key: bytes, ticket: worker_pb2.TicketRef) -> str:
        """Publish a held state. Returns why it is not kept; empty when it is."""
        hold = self._holds.pop(held_key, None)
        if hold is None:
            return NOT_HELD
        try:
            if not await asyncio.shield(hold.size):
                return NOT_HELD
            await self._residency.forget_ordered([key])
            size_bytes = await self._engine.call(Rename(held_key, key))
            return await self._residency.publish(key, ticket, size_bytes) if size_bytes else "state_dropped"
        finally:
            hold.over.set()
            await asyncio.shield(self._residency.abandon([key]))

    def let_go(self, keys: Iterable[bytes]) -> None:
        """Drop held states; other keys are ignored."""
        for key in keys:
            if hold := self._holds.pop(key, None):
                hold.over.set()

    async def _hold(self, call_id: str, hold: _Hold, events: "asyncio.Queue[GenerateEvent]") -> None:
        key = held_key_of(call_id)
        try:
            async with asyncio.timeout(self._seconds):
                event = await events.get()
                hold.size.set_result(event.size_bytes if isinstance(event, TurnHeldEvent) else 0)
                await hold.over.wait()
        except TimeoutError:
            pass
        finally:
            self._holds.pop(key, None)
            if not hold.size.done():
                hold.size.set_result(0)
            self._engine.post(Cancel(call_id))
            self._engine.post(Drop((key,)))
