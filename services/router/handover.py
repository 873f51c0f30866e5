"""Replies that another engine writes: a worker combines and holds the decode state, the engine takes it and decodes.

What is missing on the way costs time and no reply: without a state the engine computes the prompt, without an engine the worker
decodes.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace

from services.common.errors import HypicError, InternalError, OverloadedError, UnavailableError
from services.common.telemetry import get_logger
from services.router.domain.decoding import (
    DecodeOrder,
    DecodingEngine,
    StateOffer,
    computed_by,
    cut_last_token,
    with_last_token,
)
from services.router.domain.ports import (
    BeganFrom,
    DecodedBy,
    GenerateEvent,
    GenerateOrder,
    Held,
    HoldEvent,
    Prefilled,
    Released,
    Workers,
)

__all__ = ["Handover"]

# The worker says that a state was taken as it sends its last layer, long before the first token; it may be read a little later.
_RELEASE_SECONDS = 1.0


@dataclass(slots=True)
class _Composed:
    """A held state. released: the hold's last event, when it comes."""

    prefilled: Prefilled
    offer: StateOffer
    released: "asyncio.Task[HoldEvent]"

    async def is_taken(self) -> bool:
        """Whether the engine has read the state to its end; asked once it has drawn a token."""
        await asyncio.wait([self.released], timeout=_RELEASE_SECONDS)
        if not self.released.done() or self.released.cancelled() or self.released.exception() is not None:
            return False
        event = self.released.result()
        return isinstance(event, Released) and event.is_taken


class Handover:
    """One or several engines of the same model."""

    def __init__(self, workers: Workers, engines: Sequence[DecodingEngine]) -> None:
        self._workers = workers
        self._engines = engines
        self._running: Counter[str] = Counter()

    async def generate(
        self, worker_id: str, order: GenerateOrder, timeout_seconds: float
    ) -> AsyncGenerator[GenerateEvent]:
        """As a worker's own events, which name the engine.

        Raises:
            HypicError: the engine failed behind its first token, or refused the request; or nobody can decode.
        """
        async with AsyncExitStack() as stack:
            composed, reason = await self._compose(stack, worker_id, order, timeout_seconds)
            for engine in self._by_load():
                has_begun = False
                try:
                    async with aclosing(self._decode(engine, order, composed, reason, timeout_seconds)) as events:
                        async for event in events:
                            has_begun = True
                            yield event
                    return
                except (UnavailableError, OverloadedError) as error:
                    if has_begun:
                        raise
                    get_logger().warning("engine_lost_before_first_token", engine=engine.name, error=str(error))
                    # It may have read the state, which nobody reads twice.
                    composed, reason = None, "engine_lost"
        async with aclosing(self._workers.find(worker_id).generate(order, timeout_seconds)) as own:
            async for event in own:
                if isinstance(event, Prefilled):
                    event = replace(event, decoded_by=DecodedBy(worker_id, BeganFrom.WORKER, "no_engine"))
                yield event

    def _by_load(self) -> list[DecodingEngine]:
        return sorted(self._engines, key=lambda engine: self._running[engine.name])

    async def _compose(
        self, stack: AsyncExitStack, worker_id: str, order: GenerateOrder, timeout_seconds: float
    ) -> tuple[_Composed | None, str]:
        """A state that is held as long as the stack is open; None and the reason where there is none."""
        cut = cut_last_token(order)
        sources = self._workers.sources([worker_id])
        if cut is None or not sources:
            return None, "prompt_too_short" if cut is None else "worker_unreachable"
        try:
            worker = self._workers.find(worker_id)
            events = await stack.enter_async_context(aclosing(worker.hold(cut, timeout_seconds)))
            prefilled, held = await anext(events), await anext(events)
        except HypicError as error:
            get_logger().warning("prompt_not_held", worker_id=worker_id, error=str(error))
            return None, "not_held"
        except StopAsyncIteration:
            raise InternalError("the worker ended a hold without a state") from None
        if not isinstance(prefilled, Prefilled) or not isinstance(held, Held):
            raise InternalError("the worker's events of a hold are out of order")
        released = asyncio.create_task(_next(events))
        stack.push_async_callback(_end, released)
        return _Composed(prefilled, StateOffer(held.handle, sources[0].address, held.num_tokens), released), ""

    async def _decode(
        self,
        engine: DecodingEngine,
        order: GenerateOrder,
        composed: _Composed | None,
        reason: str,
        timeout_seconds: float,
    ) -> AsyncGenerator[GenerateEvent]:
        wanted = _decode_order(order, None if composed is None else composed.offer)
        has_begun = False
        self._running[engine.name] += 1
        try:
            async with aclosing(engine.decode(wanted, timeout_seconds)) as events:
                async for event in events:
                    if not has_begun:
                        has_begun = True
                        yield await _prefilled(engine, order, composed, reason)
                    yield event
        finally:
            self._running[engine.name] -= 1


async def _prefilled(
    engine: DecodingEngine, order: GenerateOrder, composed: _Composed | None, reason: str
) -> Prefilled:
    if composed is not None and await composed.is_taken():
        return with_last_token(composed.prefilled, DecodedBy(engine.name, BeganFrom.STATE))
    return computed_by(order, DecodedBy(engine.name, BeganFrom.PROMPT, reason or "not_taken"))


def _decode_order(order: GenerateOrder, offer: StateOffer | None) -> DecodeOrder:
    token_ids = tuple(token for part in order.parts for token in part.token_ids)
    return DecodeOrder(order.request_id, token_ids, order.sampling, order.stop_token_ids, offer)


async def _next(events: AsyncGenerator[HoldEvent]) -> HoldEvent:
    try:
        return await anext(events)
    except StopAsyncIteration:
        return Released(is_taken=False)


async def _end(released: "asyncio.Task[HoldEvent]") -> None:
    """Ahead of the hold's own end, which must not meet a reader."""
    released.cancel()
    await asyncio.wait([released])
    if not released.cancelled():
        released.exception()
