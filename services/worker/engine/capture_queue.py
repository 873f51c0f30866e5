"""The line of segments to capture: packs what waits into passes, stores the states, tells whoever asked."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.worker.engine.capture import (
    CapturePass,
    capture_prime,
    check_body,
    end_capture,
    pages_of,
    store_state,
)
from services.worker.engine.capture_rows import CaptureProgress
from services.worker.engine.context import EngineContext
from services.worker.engine.pages import NoRoomError
from services.worker.engine.requests import CaptureJob, CaptureSegment
from services.worker.engine.states import PrefixState, SegmentState
from services.worker.engine.sweep import ALL_LAYERS, Rows

__all__ = ["CaptureQueue"]


@dataclass(frozen=True, slots=True)
class _Order:
    """runs_alone: a sweep failed that it shared."""

    job: CaptureJob
    segment: CaptureSegment
    runs_alone: bool = False


@dataclass(slots=True)
class _Pack:
    """Orders that run through the layers together.

    cancelled: jobs that want nothing of it any more; is_swept: a chunk of it is in a sweep.
    """

    orders: list[_Order]
    capture: CapturePass
    began_at: float = field(default_factory=time.monotonic)
    cancelled: set[str] = field(default_factory=set)
    is_swept: bool = False

    @property
    def wanted(self) -> list[_Order]:
        """What nobody has cancelled."""
        return [order for order in self.orders if order.job.request_id not in self.cancelled]


class CaptureQueue:
    """Captures in order of arrival, background jobs last, chunk by chunk. See `Line`. Lives on the engine's thread."""

    def __init__(self, context: EngineContext, pack_tokens: int) -> None:
        self._context = context
        self._pack_tokens = pack_tokens
        self._orders: deque[_Order] = deque()
        self._pack: _Pack | None = None
        self._prime = capture_prime(context)

    @property
    def is_ready(self) -> bool:
        """See `Line`."""
        return bool(self._orders) if self._pack is None else not self._pack.is_swept

    @property
    def has_work(self) -> bool:
        """See `Line`."""
        return bool(self._orders) or self._pack is not None

    @property
    def layers_present(self) -> int:
        """See `Line`: captures wait for nothing."""
        return ALL_LAYERS

    def note_blocked(self, layer: int, seconds: float) -> None:
        """See `Line`."""

    def submit(self, job: CaptureJob) -> None:
        """Put a job's segments in the line."""
        self._line_up([*self._orders, *(_Order(job, segment) for segment in job.segments)])

    def cancel(self, request_id: str) -> bool:
        """See `Line`; a pack that others share runs on, and keeps nothing for the cancelled job."""
        self._orders = deque(order for order in self._orders if order.job.request_id != request_id)
        pack = self._pack
        if pack is None:
            return False
        pack.cancelled.add(request_id)
        if pack.wanted:
            return False
        self._abandon(pack)
        return True

    def take(self) -> Sequence[Rows]:
        """See `Line`: the next chunk of the running pack, or the first of a new one."""
        return self._take_chunk(self._pack_tokens)

    def take_within(self, tokens: int) -> Sequence[Rows]:
        """As `take`, where that brings no more than so many tokens; none else. A background job begins only by `take`."""
        return self._take_chunk(min(tokens, self._pack_tokens)) if self.is_ready and self._fits(tokens) else ()

    def finish(self) -> None:
        """See `Line`."""
        pack = self._current()
        pack.is_swept = False
        if not pack.capture.is_complete:
            return
        try:
            states = pack.capture.finish()
        except Exception as error:
            if self._context.is_split:
                raise
            self.fail(error)
        else:
            self._pack = None
            self._keep(pack, states)

    def retry(self) -> None:
        """See `Line`."""
        pack = self._current()
        self._abandon(pack)
        self._line_up([*(replace(order, runs_alone=True) for order in pack.wanted), *self._orders])

    def fail(self, error: Exception) -> None:
        """See `Line`."""
        pack = self._current()
        if len(pack.orders) > 1:
            self.retry()
            return
        self._abandon(pack)
        for order in pack.wanted:
            self._end(order, f"capture failed: {error}", 0.0)

    @property
    def prime(self) -> PrefixState | None:
        """The snapshot from which every segment starts."""
        return self._prime

    def find(self, key: bytes) -> CaptureProgress | None:
        """The capture that runs under a key."""
        orders = [] if self._pack is None else self._pack.orders
        keys = [order.segment.key for order in orders]
        return self._pack.capture.watch(keys.index(key)) if self._pack is not None and key in keys else None

    @property
    def tokens_left(self) -> int:
        """Tokens of segments that are not captured yet."""
        orders = self._orders if self._pack is None else (*self._pack.orders, *self._orders)
        return sum(len(order.segment.token_ids) for order in orders)

    @property
    def num_prime_pages(self) -> int:
        """Pages that the prime holds for good."""
        return 0 if self._prime is None else len(self._prime.pages)

    def held_pages(self) -> list[tuple[int, ...]]:
        """Pages of the prime and of the running pass."""
        held = [] if self._prime is None else [self._prime.pages]
        return held if self._pack is None else [*held, self._pack.capture.held_pages]

    def _current(self) -> _Pack:
        if self._pack is None:
            raise RuntimeError("no capture runs")
        return self._pack

    def _abandon(self, pack: _Pack) -> None:
        pack.capture.abandon()
        self._pack = None

    def _take_chunk(self, pack_tokens: int) -> Sequence[Rows]:
        if self._pack is None:
            self._pack = self._create_pack(self._take_orders(pack_tokens))
        if self._pack is None:
            return ()
        self._pack.is_swept = True
        return self._pack.capture.take_chunk()

    def _fits(self, tokens: int) -> bool:
        """The next chunk may stand beside other rows, and brings no more than so many tokens."""
        if self._pack is not None:
            return not self._pack.orders[0].runs_alone and self._pack.capture.next_tokens <= tokens
        head = self._orders[0]
        return not (head.runs_alone or head.job.background) and len(head.segment.token_ids) <= tokens

    def _create_pack(self, orders: list[_Order]) -> _Pack | None:
        while orders:
            segments = [order.segment.token_ids for order in orders]
            self._context.store.make_room(sum(pages_of(self._context, token_ids) for token_ids in segments))
            try:
                return _Pack(orders, CapturePass(self._context, segments, self._prime))
            except NoRoomError as error:
                orders = self._shrink(orders, str(error))
            except Exception as error:
                if self._context.is_split:
                    raise
                for order in orders:
                    self._end(order, f"capture failed: {error}", 0.0)
                return None
        return None

    def _shrink(self, orders: list[_Order], reason: str) -> list[_Order]:
        """What to try when orders do not fit together: the first half, the rest waits; one alone has failed."""
        if len(orders) == 1:
            self._end(orders[0], reason, 0.0)
            return []
        half = len(orders) // 2
        self._line_up([*orders[half:], *self._orders])
        return orders[:half]

    def _keep(self, pack: _Pack, states: list[SegmentState]) -> None:
        seconds = time.monotonic() - pack.began_at
        tokens = sum(len(order.segment.token_ids) for order in pack.orders)
        for order, state in zip(pack.orders, states, strict=True):
            if order.job.request_id in pack.cancelled:
                self._context.pages.release(state.pages)
            else:
                self._end(order, store_state(self._context, order.segment.key, state), seconds, tokens)

    def _line_up(self, orders: Sequence[_Order]) -> None:
        self._orders = deque(sorted(orders, key=lambda order: order.job.background))

    def _take_orders(self, pack_tokens: int) -> list[_Order]:
        """The next orders that fit one pass, at least one; what is there already, or has no body, ends at once."""
        room = 0 if self._orders and self._orders[0].runs_alone else pack_tokens
        taken: dict[bytes, _Order] = {}
        while self._orders:
            order = self._orders[0]
            length = len(order.segment.token_ids)
            if taken and (length > room or order.segment.key in taken or order.runs_alone):
                break
            self._orders.popleft()
            if order.segment.key in self._context.store:
                self._end(order, "", 0.0)
            elif self._has_body(order):
                taken[order.segment.key] = order
                room -= length
        return list(taken.values())

    def _has_body(self, order: _Order) -> bool:
        try:
            check_body(self._context, order.segment.token_ids)
        except ValueError as error:
            self._end(order, str(error), 0.0)
            return False
        return True

    def _end(self, order: _Order, reason: str, seconds: float, pass_tokens: int = 0) -> None:
        event = end_capture(self._context, order.segment.key, seconds, reason)
        order.job.sink(replace(event, pass_tokens=pass_tokens))
