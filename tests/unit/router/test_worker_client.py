"""Calls of a worker: what one leaves behind."""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing

import grpc
from hypic.v1 import worker_pb2, worker_pb2_grpc

from services.common.rpc import HealthSwitch, create_server, worker_channel
from services.router.adapters.clients import GrpcWorker
from services.router.adapters.generate_stream import GenerateCall
from services.router.domain.ports import Finished, GenerateOrder, PartOrder, PartServing
from services.router.domain.request import Sampling
from services.worker.adapters.generate_streams import GenerateStreams

NUM_CALLS = 20
IDS = tuple(range(100))
ORDER = GenerateOrder(
    request_id="r",
    lease_id="",
    parts=(PartOrder(IDS, PartServing.SEGMENT, b"key"), PartOrder(IDS[:7], PartServing.LIVE)),
    sampling=Sampling(),
    stop_token_ids=(),
    prefix_key=b"",
    snapshots=(),
)


class Replier(worker_pb2_grpc.WorkerServiceServicer):
    """Says one token."""

    def __init__(self) -> None:
        self.parts: list[tuple[tuple[int, ...], int, bytes]] = []

    async def Generate(  # noqa: N802 # the name is the protocol's
        self,
        request_iterator: AsyncIterable[worker_pb2.GenerateOrders],
        context: grpc.aio.ServicerContext[worker_pb2.GenerateOrders, worker_pb2.GenerateEvents],
    ) -> AsyncGenerator[worker_pb2.GenerateEvents]:
        async with aclosing(GenerateStreams(self._reply).serve(request_iterator)) as messages:
            async for message in messages:
                yield message

    async def _reply(self, request: worker_pb2.GenerateRequest) -> AsyncGenerator[worker_pb2.GenerateEvent]:
        self.parts = [(tuple(part.token_ids), part.serving, part.key) for part in request.parts]
        yield worker_pb2.GenerateEvent(tokens=worker_pb2.Tokens(token_ids=[1]))
        yield worker_pb2.GenerateEvent(finished=worker_pb2.Finished(reason=worker_pb2.FINISH_REASON_STOP))


async def reply(worker: GrpcWorker) -> None:
    async with aclosing(worker.generate(ORDER, 60.0)) as events:
        async for event in events:
            if isinstance(event, Finished):
                return


def num_calls_alive() -> int:
    return sum(type(each) is GenerateCall for each in gc.get_objects())


async def test_a_reply_that_has_ended_is_freed_without_the_collector() -> None:
    servicer = Replier()  # type: ignore[abstract] # nothing else is called
    server, port = await create_server(
        [lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)],
        "127.0.0.1:0",
        HealthSwitch(),
    )
    channel = worker_channel(f"127.0.0.1:{port}", None)
    try:
        async with asyncio.timeout(60):
            await channel.channel_ready()
        worker = GrpcWorker(channel)
        await reply(worker)
        gc.collect()
        gc.disable()
        for _ in range(NUM_CALLS):
            await reply(worker)
        # The tasks of a call that was left end in turns of the loop that follow.
        for _ in range(1000):
            if not num_calls_alive():
                break
            await asyncio.sleep(0.01)
        assert num_calls_alive() == 0
        segment, live = servicer.parts
        assert segment == (IDS, worker_pb2.PART_SERVING_SEGMENT, b"key")
        assert live == (IDS[:7], worker_pb2.PART_SERVING_LIVE, b"")
    finally:
        gc.enable()
        await channel.close()
        await server.stop(None)
