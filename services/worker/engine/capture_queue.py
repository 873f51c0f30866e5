"""The line of segments to capture: packs what waits into passes, stores the states, tells whoever asked."""

import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

from services.worker.engine.capture import CapturePass, capture_prime, check_body, pages_of
from services.worker.engine.context import EngineContext
from services.worker.engine.pages import NoRoomError
from services.worker.engine.requests import CaptureEvent, CaptureJob, CaptureSegment
from services.worker.engine.states import SegmentState

__all__ = ["CaptureQueue"]


@dataclass(frozen=True, slots=True)
class _Order:
    job: CaptureJob
    segment: CaptureSegment


@dataclass(slots=True)
class _Pack:
    """Orders that run through the layers together.

    tokens: what one advance costs, in token layers; cancelled: jobs that want nothing of it any more.
    """

    orders: list[_Order]
    capture: CapturePass
    steps: Generator[None, None, list[SegmentState]]
    tokens: int
    began_at: float = field(default_factory=time.monotonic)
    cancelled: set[str] = field(default_factory=set)


class CaptureQueue:
    """Captures in order of arrival, background jobs last. Lives on the engine's thread."""

    def __init__(self, context: EngineContext, pack_tokens: int) -> None:
        self._context = context
        self._pack_tokens = pack_tokens
        self._orders: deque[_Order] = deque()
        self._pack: _Pack | None = None
        self._prime = capture_prime(context)

    @property
    def has_work(self) -> bool:
        """Something is left to capture."""
        return bool(self._orders) or self._pack is not None

    def submit(self, job: CaptureJob) -> None:
        """Put a job's segments in the line."""
        self._orders.extend(_Order(job, segment) for segment in job.segments)

    def cancel(self, request_id: str) -> None:
        """Forget a job's segments; a pass that others share runs on, and keeps nothing for the cancelled job."""
        self._orders = deque(order for order in self._orders if order.job.request_id != request_id)
        pack = self._pack
        if pack is None:
            return
        pack.cancelled.add(request_id)
        if all(order.job.request_id in pack.cancelled for order in pack.orders):
            pack.capture.abandon()
            self._pack = None

    def advance(self) -> int:
        """One layer of the running pass, or the start of the next; returns token layers spent."""
        pack = self._pack
        if pack is None:
            self._begin()
            return 0
        try:
            next(pack.steps)
        except StopIteration as finished:
            self._pack = None
            self._keep(pack, finished.value)
        except Exception as error:
            self._pack = None
            pack.capture.abandon()
            for order in pack.orders:
                if order.job.request_id not in pack.cancelled:
                    self._end(order, f"capture failed: {error}", 0.0)
        return pack.tokens

    @property
    def num_prime_pages(self) -> int:
        """Pages that the prime holds for good."""
        return 0 if self._prime is None else len(self._prime.pages)

    def held_pages(self) -> list[tuple[int, ...]]:
        """Pages of the prime and of the running pass."""
        held = [] if self._prime is None else [self._prime.pages]
        return held if self._pack is None else [*held, self._pack.capture.held_pages]

    def _begin(self) -> None:
        orders = self._take()
        while orders:
            segments = [order.segment.token_ids for order in orders]
            self._context.store.make_room(sum(pages_of(self._context, token_ids) for token_ids in segments))
            try:
                capture = CapturePass(self._context, segments, self._prime)
            except NoRoomError as error:
                orders = self._shrink(orders, str(error))
            except Exception as error:
                for order in orders:
                    self._end(order, f"capture failed: {error}", 0.0)
                return
            else:
                tokens = min(capture.num_tokens, self._context.profile.chunk_tokens * len(orders))
                self._pack = _Pack(orders, capture, capture.run(), tokens)
                return

    def _shrink(self, orders: list[_Order], reason: str) -> list[_Order]:
        """What to try when orders do not fit together: the first half, the rest waits; one alone has failed."""
        if len(orders) == 1:
            self._end(orders[0], reason, 0.0)
            return []
        half = len(orders) // 2
        self._orders.extendleft(reversed(orders[half:]))
        return orders[:half]

    def _keep(self, pack: _Pack, states: list[SegmentState]) -> None:
        seconds = time.monotonic() - pack.began_at
        for order, state in zip(pack.orders, states, strict=True):
            if order.job.request_id in pack.cancelled:
                self._context.pages.release(state.pages)
            else:
                self._end(order, self._store(order.segment.key, state), seconds)

    def _take(self) -> list[_Order]:
        """The next orders that fit one pass; what is there already, or has no body, ends at once."""
        self._orders = deque(sorted(self._orders, key=lambda order: order.job.background))
        taken: dict[bytes, _Order] = {}
        tokens = 0
        while self._orders:
            order = self._orders[0]
            tokens += len(order.segment.token_ids)
            if taken and (tokens > self._pack_tokens or order.segment.key in taken):
                break
            self._orders.popleft()
            if order.segment.key in self._context.store:
                self._end(order, "", 0.0)
            elif self._has_body(order):
                taken[order.segment.key] = order
        return list(taken.values())

    def _has_body(self, order: _Order) -> bool:
        try:
            check_body(self._context, order.segment.token_ids)
        except ValueError as error:
            self._end(order, str(error), 0.0)
            return False
        return True

    def _store(self, key: bytes, state: SegmentState) -> str:
        """Why the state could not be stored; empty when it was."""
        try:
            self._context.store.put(key, state)
        except (NoRoomError, ValueError) as error:
            self._context.pages.release(state.pages)
            return str(error)
        return ""

    def _end(self, order: _Order, reason: str, seconds: float) -> None:
        state = None if reason else self._context.store.get(order.segment.key)
        size = 0 if state is None else self._context.store.size_bytes(state)
        order.job.sink(CaptureEvent(order.segment.key, size, seconds, reason))
