"""Replies over one stream: the router's side against the worker's, over real gRPC, with answers that a test writes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from contextlib import aclosing

import grpc
import pytest
from hypic.v1 import worker_pb2, worker_pb2_grpc

from services.common.errors import (
    DeadlineError,
    HypicError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from services.common.rpc import HealthSwitch, create_server, worker_channel
from services.common.telemetry import current_request_id, set_request_id
from services.router.adapters.generate_stream import GenerateCall, GenerateStream
from services.worker.adapters.generate_streams import GenerateStreams

SECONDS = 60.0
FINISHED = worker_pb2.GenerateEvent(finished=worker_pb2.Finished(reason=worker_pb2.FINISH_REASON_STOP))


def token(number: int) -> worker_pb2.GenerateEvent:
    return worker_pb2.GenerateEvent(tokens=worker_pb2.Tokens(token_ids=[number]))


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Says `max_tokens` tokens of which each is the request's priority, and waits before the end where it is negative."""

    def __init__(self) -> None:
        self.streams = GenerateStreams(self.answer)
        self.error: Exception | None = None
        self.may_end = asyncio.Event()
        self.running = 0
        self.request_ids: list[str] = []
        self.num_streams = 0

    async def Generate(  # noqa: N802 # the name is the protocol's
        self,
        request_iterator: AsyncIterable[worker_pb2.GenerateOrders],
        context: grpc.aio.ServicerContext[worker_pb2.GenerateOrders, worker_pb2.GenerateEvents],
    ) -> AsyncGenerator[worker_pb2.GenerateEvents]:
        self.num_streams += 1
        async with aclosing(self.streams.serve(request_iterator)) as messages:
            async for message in messages:
                yield message

    async def answer(self, request: worker_pb2.GenerateRequest) -> AsyncGenerator[worker_pb2.GenerateEvent]:
        self.request_ids.append(current_request_id())
        self.running += 1
        try:
            for _ in range(request.sampling.max_tokens):
                yield token(abs(request.priority))
            if request.priority < 0:
                await self.may_end.wait()
            if self.error is not None:
                raise self.error
            if request.sampling.max_tokens:
                yield FINISHED
        finally:
            self.running -= 1


class Rig:
    """One worker, and a router's stream to it."""

    def __init__(self) -> None:
        self.worker = Worker()  # type: ignore[abstract] # nothing else is called
        self.port = 0

    async def start(self) -> None:
        self.server, self.port = await create_server(
            [lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.worker, server)],
            f"127.0.0.1:{self.port}",
            HealthSwitch(),
        )

    async def connect(self) -> None:
        self.channel = worker_channel(f"127.0.0.1:{self.port}", None)
        await self.channel.channel_ready()
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        self.stream = GenerateStream(self.stub)

    def begin(self, priority: int, max_tokens: int = 3, seconds: float = SECONDS) -> GenerateCall:
        return self.stream.begin(lambda message: message.CopyFrom(request(priority, max_tokens)), seconds)


def request(priority: int, max_tokens: int = 3, call: int = 0) -> worker_pb2.GenerateRequest:
    sampling = worker_pb2.Sampling(max_tokens=max_tokens)
    return worker_pb2.GenerateRequest(priority=priority, sampling=sampling, call=call)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with asyncio.timeout(SECONDS):
        own = Rig()
        await own.start()
        await own.connect()
        yield own
        await own.channel.close()
        await own.server.stop(0)


async def read(call: GenerateCall) -> list[int]:
    """All tokens of one call."""
    tokens: list[int] = []
    try:
        while not call.has_ended:
            tokens += (await call.next()).tokens.token_ids
    finally:
        call.leave()
    return tokens


async def until_idle(rig: Rig) -> None:
    while rig.worker.running:  # noqa: ASYNC110 # a count of the worker's
        await asyncio.sleep(0.005)


async def test_many_replies_share_a_stream_and_come_apart(rig: Rig) -> None:
    calls = [rig.begin(number, max_tokens=number) for number in range(1, 30)]
    replies = await asyncio.gather(*map(read, calls))
    assert replies == [[number] * number for number in range(1, 30)]
    assert rig.worker.num_streams == 1


async def test_what_is_said_at_a_time_goes_in_one_message(rig: Rig) -> None:
    raw = rig.stub.Generate()
    await raw.write(worker_pb2.GenerateOrders(begun=[request(5, call=1), request(6, call=2)]))
    message = await raw.read()
    assert isinstance(message, worker_pb2.GenerateEvents)
    said = [(event.call, event.WhichOneof("event")) for event in message.events]
    assert said == [(call, kind) for call in (1, 2) for kind in ("tokens", "tokens", "tokens", "finished")]
    raw.cancel()


async def test_one_that_is_left_ends_and_no_other(rig: Rig) -> None:
    kept, left = rig.begin(-1), rig.begin(-2)
    assert (await left.next()).tokens.token_ids == [2]
    left.leave()
    while rig.worker.running > 1:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    rig.worker.may_end.set()
    assert await read(kept) == [1, 1, 1]


async def test_one_that_is_left_before_it_was_sent_is_not_begun_for_long(rig: Rig) -> None:
    rig.begin(-1).leave()
    assert await read(rig.begin(2)) == [2, 2, 2]
    await until_idle(rig)


async def test_a_reply_that_has_ended_is_not_cancelled(rig: Rig) -> None:
    """Nothing is sent behind its end."""
    assert await read(rig.begin(1)) == [1, 1, 1]
    raw = rig.stream._open
    assert raw is not None
    assert not raw._has_orders


@pytest.mark.parametrize("error", [InvalidRequestError("no"), OverloadedError("full"), UnavailableError("draining")])
async def test_errors_of_one_reply_cross_the_wire(rig: Rig, error: HypicError) -> None:
    rig.worker.error = error
    with pytest.raises(type(error), match=str(error)):
        await read(rig.begin(1))
    rig.worker.error = None
    assert await read(rig.begin(1)) == [1, 1, 1]
    assert rig.worker.num_streams == 1


async def test_faults_of_the_worker_are_internal(rig: Rig) -> None:
    rig.worker.error = KeyError("secret")
    with pytest.raises(InternalError) as failed:
        await read(rig.begin(1))
    assert "secret" not in str(failed.value)
    rig.worker.error = None
    with pytest.raises(InternalError, match="without a finish"):
        await read(rig.begin(1, max_tokens=0))
    assert await read(rig.begin(1)) == [1, 1, 1]


async def test_time_runs_out_on_both_sides(rig: Rig) -> None:
    with pytest.raises(DeadlineError):
        await read(rig.begin(-1, seconds=0.05))
    await until_idle(rig)
    raw = rig.stub.Generate()
    late = request(-1, max_tokens=0, call=1)
    late.timeout_seconds = 0.05
    await raw.write(worker_pb2.GenerateOrders(begun=[late]))
    message = await raw.read()
    assert isinstance(message, worker_pb2.GenerateEvents)
    assert message.events[0].failed.status == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    raw.cancel()


async def test_a_worker_that_dies_ends_its_replies_and_another_stream_follows(rig: Rig) -> None:
    calls = [rig.begin(-1), rig.begin(-2)]
    for call in calls:
        await call.next()
    await rig.server.stop(0)
    for call in calls:
        with pytest.raises(UnavailableError):
            await read(call)
    with pytest.raises(UnavailableError):
        await read(rig.begin(1))
    await rig.start()
    await rig.channel.channel_ready()
    assert await read(rig.begin(1)) == [1, 1, 1]


async def test_a_silent_worker_is_left_at_once(rig: Rig) -> None:
    call = rig.begin(-1)
    await call.next()
    rig.stream.fail_all("it is silent")
    with pytest.raises(UnavailableError, match="it is silent"):
        await read(call)
    await until_idle(rig)


async def test_a_router_that_goes_ends_its_replies(rig: Rig) -> None:
    calls = [rig.begin(-1), rig.begin(-1)]
    for call in calls:
        await call.next()
    await rig.channel.close()
    await until_idle(rig)
    with pytest.raises(UnavailableError):
        await read(calls[0])


async def test_a_worker_that_drains_finishes_what_it_has_read(rig: Rig) -> None:
    call = rig.begin(-1)
    await call.next()
    rig.worker.streams.drain()
    rig.worker.may_end.set()
    assert await read(call) == [1, 1]
    with pytest.raises(UnavailableError):
        await read(rig.begin(2))
    await rig.server.stop(None)


async def test_a_reply_runs_under_its_requests_id(rig: Rig) -> None:
    set_request_id("the client's")
    assert await read(rig.begin(1)) == [1, 1, 1]
    assert rig.worker.request_ids == ["the client's"]
