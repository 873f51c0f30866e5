"""The worker's gRPC service. A call's life: check the message, hand it to the engine, pass events on, free on the way out."""

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import replace
from typing import TypeVar

import grpc
from hypic.v1 import worker_pb2, worker_pb2_grpc

from services.common.errors import InvalidRequestError, NotFoundError, UnavailableError
from services.worker.adapters import messages
from services.worker.adapters.byte_budget import ByteBudget
from services.worker.adapters.description import WorkerPlace, describe
from services.worker.adapters.engine_thread import EngineThread
from services.worker.adapters.generate_streams import GenerateStreams
from services.worker.adapters.grammars import GrammarCompiler
from services.worker.adapters.held_states import HeldStates
from services.worker.adapters.held_turns import HeldTurns, held_key_of
from services.worker.adapters.metrics import TokenGaps, WorkerMetrics
from services.worker.adapters.prompt_fetch import PromptFetch
from services.worker.adapters.residency import Residency
from services.worker.adapters.served_model import ServedModel
from services.worker.adapters.stage_spans import StageSpans
from services.worker.adapters.state_sender import StateSender
from services.worker.adapters.transfers import Transfers
from services.worker.engine.commands import Cancel, Submit, SubmitCapture
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    EngineError,
    FailedEvent,
    FetchEvent,
    FinishedEvent,
    GenerateEvent,
    HeldEvent,
    PrefilledEvent,
    TokenEvent,
    TurnHeldEvent,
    TurnHold,
)

__all__ = ["WorkerService"]

Event = TypeVar("Event")


class _Publishing:
    """Publishes the states of one request beside its reply: no token waits for a slow cache service."""

    def __init__(self, residency: Residency, tickets: Mapping[bytes, worker_pb2.TicketRef]) -> None:
        self._residency = residency
        self._tickets = tickets
        self._tasks: list[asyncio.Task[str]] = []

    def start(self, key: bytes, size_bytes: int) -> None:
        """Begin with a state that the store holds; one that is refused is dropped."""
        publish = self._residency.publish(key, self._tickets[key], size_bytes)
        self._tasks.append(asyncio.create_task(publish))

    async def wait(self) -> None:
        """Until all are published or refused."""
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        """Stop what has not ended."""
        for task in self._tasks:
            task.cancel()


class _RunningCalls:
    """How many calls do work for somebody."""

    def __init__(self) -> None:
        self._number = 0
        self._none_left = asyncio.Event()

    def begin(self) -> ExitStack:
        """Count a call until the stack is closed."""
        self._number += 1
        ending = ExitStack()
        ending.callback(self._end)
        return ending

    def _end(self) -> None:
        self._number -= 1
        self._none_left.set()

    async def wait(self, seconds: float) -> None:
        """Until none is left, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._number:
                    self._none_left.clear()
                    await self._none_left.wait()


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """One model's service. While the worker drains, new work is refused and streams run out."""

    def __init__(
        self,
        served: ServedModel,
        place: WorkerPlace,
        engine: EngineThread,
        residency: Residency,
        transfers: Transfers,
        held: HeldStates,
        metrics: WorkerMetrics,
    ) -> None:
        self._served = served
        self._place = place
        self._engine = engine
        self._residency = residency
        self._transfers = transfers
        self._held = held
        self._metrics = metrics
        self._running = _RunningCalls()
        self._grammars = GrammarCompiler(served.tokenizer_json, served.spec.vocab_size, served.stop_token_ids)
        self._turns = HeldTurns(engine, residency, place.turn_seconds)
        self._sender = StateSender(residency.tiers, residency.receipt_of, ByteBudget(place.fetch_bytes))
        self._streams = GenerateStreams(self._generate)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, and wait so long for what runs; states are still given to others meanwhile."""
        self._residency.begin_draining()
        await self._running.wait(seconds)
        self._streams.drain()

    async def Describe(  # noqa: N802 # the name is the protocol's
        self,
        request: worker_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[worker_pb2.DescribeRequest, worker_pb2.DescribeResponse],
    ) -> AsyncIterator[worker_pb2.DescribeResponse]:
        """See worker.proto."""
        for message in describe(self._served, self._place):
            yield message

    async def Generate(  # noqa: N802
        self,
        request_iterator: AsyncIterable[worker_pb2.GenerateOrders],
        context: grpc.aio.ServicerContext[worker_pb2.GenerateOrders, worker_pb2.GenerateEvents],
    ) -> AsyncIterator[worker_pb2.GenerateEvents]:
        """See worker.proto."""
        async with aclosing(self._streams.serve(request_iterator)) as messages_of_calls:
            async for message in messages_of_calls:
                yield message

    async def _generate(self, request: worker_pb2.GenerateRequest) -> AsyncGenerator[worker_pb2.GenerateEvent]:
        self._check_takes(self._place.can_combine, "combine")
        if any(part.HasField("capture") for part in request.parts):
            self._check_takes(self._place.can_capture, "prefill")
        if request.HasField("hold"):
            self._held.check()
        call_id = uuid.uuid4().hex
        events: asyncio.Queue[GenerateEvent] = asyncio.Queue()
        job = messages.generate_request(request, call_id, self._served.spec.vocab_size, _sink_to(events))
        ordered = {part.key: part.capture for part in request.parts if part.HasField("capture")}
        tickets = ordered | {order.key: order.ticket for order in request.snapshots}
        publishing, gaps = _Publishing(self._residency, tickets), TokenGaps(self._metrics)
        wanted = messages.wanted_states(request)
        counted, held_key = self._running.begin(), b""
        self._transfers.use(wanted)
        try:
            refresh = messages.refresh_order(request, self._residency.tiers.policy.engine)
            grammar = await self._grammars.compile(request)
            job = replace(job, grammar=grammar, refresh=refresh, turn=self._turn_of(request, call_id))
            await self._residency.forget_ordered(ordered)
            fetch = PromptFetch(await self._transfers.plan(wanted) if self._place.moves_states else {})
            await self._engine.call(Submit(fetch.mark(job)))
            stages = StageSpans()
            async for event in _until_finished(events):
                stages.note(event)
                if isinstance(event, FetchEvent):
                    # What does not come leaves time to be computed.
                    self._transfers.start(event, wanted[event.key], (request.timeout_seconds or math.inf) / 2)
                    continue
                if isinstance(event, CaptureEvent):
                    self._metrics.on_capture(event)
                    if not event.reason:
                        publishing.start(event.key, event.size_bytes)
                    continue
                if isinstance(event, HeldEvent):
                    with self._held.keep(call_id, tuple(job.prompt_ids), event, request.hold.seconds) as held:
                        yield messages.held_message(held)
                        await held.wait()
                    await publishing.wait()
                    yield messages.released_message(held)
                    return
                if isinstance(event, FinishedEvent):
                    # The caller goes with the last event, and what is unpublished then is dropped.
                    await publishing.wait()
                    held_key = self._turns.adopt(call_id, events) if event.holds else b""
                if isinstance(event, PrefilledEvent):
                    event = fetch.complete(event, job, self._transfers.describe)
                yield messages.event_message(event, held_key)
                if isinstance(event, PrefilledEvent):
                    self._on_prefilled(event)
                    for snapshot in event.snapshots:
                        publishing.start(snapshot.key, snapshot.size_bytes)
                if isinstance(event, TokenEvent):
                    gaps.note_token()
        except EngineError as error:
            raise messages.service_error(error) from error
        finally:
            publishing.cancel()
            if not held_key:
                self._engine.post(Cancel(call_id))
            counted.close()
            await asyncio.shield(self._leave(tickets, wanted.keys()))

    async def Keep(  # noqa: N802
        self,
        request: worker_pb2.KeepRequest,
        context: grpc.aio.ServicerContext[worker_pb2.KeepRequest, worker_pb2.KeepResponse],
    ) -> worker_pb2.KeepResponse:
        """See worker.proto."""
        messages.check_key("key", request.key)
        reason = await self._turns.keep(request.held_key, request.key, request.ticket)
        return worker_pb2.KeepResponse(reason=reason)

    async def Capture(  # noqa: N802
        self,
        request: worker_pb2.CaptureRequest,
        context: grpc.aio.ServicerContext[worker_pb2.CaptureRequest, worker_pb2.CaptureEvent],
    ) -> AsyncIterator[worker_pb2.CaptureEvent]:
        """See worker.proto."""
        self._check_takes(self._place.can_capture, "prefill")
        call_id = uuid.uuid4().hex
        events: asyncio.Queue[CaptureEvent] = asyncio.Queue()
        segments = messages.capture_segments(request, self._served.spec.vocab_size)
        tickets = {segment.key: segment.ticket for segment in request.segments}
        job = CaptureJob(call_id, segments, _sink_to(events), request.background)
        counted = self._running.begin()
        try:
            await self._engine.call(SubmitCapture(job))
            for _ in segments:
                event = await events.get()
                self._on_captured(event)
                yield await self._publish_capture(event, tickets[event.key])
        finally:
            self._engine.post(Cancel(call_id))
            counted.close()
            await asyncio.shield(self._residency.abandon(tickets))

    async def Fetch(  # noqa: N802
        self,
        request: worker_pb2.FetchRequest,
        context: grpc.aio.ServicerContext[worker_pb2.FetchRequest, worker_pb2.Chunk],
    ) -> AsyncIterator[worker_pb2.Chunk]:
        """See worker.proto."""
        if not self._place.moves_states:
            raise NotFoundError(
                "this worker's ranks hold shares of its states, which leave it for no one; compute the part"
            )
        async with aclosing(self._sender.send(request)) as sent:
            async for message in sent:
                yield message

    async def Take(  # noqa: N802
        self,
        request: worker_pb2.TakeRequest,
        context: grpc.aio.ServicerContext[worker_pb2.TakeRequest, worker_pb2.Chunk],
    ) -> AsyncIterator[worker_pb2.Chunk]:
        """See worker.proto."""
        async with aclosing(self._held.take(request.handle)) as sent:
            async for message in sent:
                yield message

    async def Report(  # noqa: N802
        self,
        request: worker_pb2.ReportRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ReportRequest, worker_pb2.ReportResponse],
    ) -> worker_pb2.ReportResponse:
        """See worker.proto."""
        myself = self._residency.myself
        return worker_pb2.ReportResponse(
            load=myself.load, speeds=myself.speeds, draining=myself.is_draining, tiers=self._residency.usage()
        )

    async def Drop(  # noqa: N802
        self,
        request: worker_pb2.DropRequest,
        context: grpc.aio.ServicerContext[worker_pb2.DropRequest, worker_pb2.DropResponse],
    ) -> worker_pb2.DropResponse:
        """See worker.proto."""
        self._turns.let_go(request.keys)
        return worker_pb2.DropResponse(num_dropped=await self._residency.drop(request.keys))

    async def _leave(self, ordered: Iterable[bytes], used: Collection[bytes]) -> None:
        """A request has ended: what it has not published is dropped, what it used of other workers given back."""
        await self._residency.abandon(ordered)
        await self._transfers.leave(used)

    def _turn_of(self, request: worker_pb2.GenerateRequest, call_id: str) -> TurnHold | None:
        hold = messages.turn_hold(request, held_key_of(call_id), self._served.spec.vocab_size)
        return hold if self._place.turn_seconds else None

    def _on_captured(self, event: CaptureEvent) -> None:
        self._metrics.on_capture(event)
        if event.pass_tokens:
            self._residency.tiers.policy.captures.observe(event.seconds, event.pass_tokens)

    def _on_prefilled(self, event: PrefilledEvent) -> None:
        self._metrics.on_prefilled(event, len(self._served.spec.layers))
        if not any(part.refreshed_tokens for part in event.parts):
            # A refresh looks at the prompt first: its seconds are of more than one pass.
            computed = sum(part.live_tokens + part.captured_tokens for part in event.parts)
            self._residency.tiers.policy.engine.observe(event.combine_seconds, computed)

    def _check_takes(self, has_role: bool, role: str) -> None:
        if not has_role:
            raise InvalidRequestError(
                f"worker {self._place.worker_id} has not the role {role}; HYPIC_WORKER_ROLES gives it, or send the request"
                " to a worker that has"
            )
        if self._residency.myself.is_draining:
            raise UnavailableError("the worker is draining; send the request to another one")

    async def _publish_capture(self, event: CaptureEvent, ticket: worker_pb2.TicketRef) -> worker_pb2.CaptureEvent:
        reason = event.reason or await self._residency.publish(event.key, ticket, event.size_bytes)
        return worker_pb2.CaptureEvent(
            key=event.key,
            outcome=worker_pb2.CAPTURE_OUTCOME_FAILED if reason else worker_pb2.CAPTURE_OUTCOME_STORED,
            reason=reason,
            size_bytes=0 if reason else event.size_bytes,
            seconds=event.seconds,
        )


def _sink_to(events: "asyncio.Queue[Event]") -> Callable[[Event], None]:
    """A sink for the engine's thread that fills a queue of this thread's event loop."""
    loop = asyncio.get_running_loop()

    def sink(event: Event) -> None:
        # The loop is closed only when the process ends.
        if not loop.is_closed():
            loop.call_soon_threadsafe(events.put_nowait, event)

    return sink


async def _until_finished(
    events: "asyncio.Queue[GenerateEvent]",
) -> AsyncIterator[CaptureEvent | FetchEvent | PrefilledEvent | TokenEvent | HeldEvent | FinishedEvent]:
    while True:
        event = await events.get()
        if isinstance(event, FailedEvent):
            raise event.error
        if isinstance(event, TurnHeldEvent):
            raise AssertionError("a turn is held behind its reply's end")
        yield event
        if isinstance(event, FinishedEvent):
            return
