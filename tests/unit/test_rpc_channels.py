"""Which peers a channel's calls reach."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc import create_channel

_NUM_CALLS = 40
_FIRST = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
_SECOND = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
_PATIENCE_SECONDS = 30


class _Named(health_pb2_grpc.HealthServicer):
    """Says which of several servers answers."""

    def __init__(self, answer: health_pb2.HealthCheckResponse) -> None:
        self._answer = answer

    async def Check(  # noqa: N802 # the name is the protocol's
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> health_pb2.HealthCheckResponse:
        return self._answer


async def _served(stack: AsyncExitStack, answer: health_pb2.HealthCheckResponse) -> str:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(_Named(answer), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, 0.0)
    return f"127.0.0.1:{port}"


async def _answers(address: str) -> Counter[int]:
    async with create_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answers = [
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True)
            for _ in range(_NUM_CALLS)
        ]
    return Counter(answer.status for answer in answers)


async def test_calls_to_a_name_of_several_addresses_reach_all_of_them() -> None:
    async with AsyncExitStack() as stack:
        first, second = [await _served(stack, answer) for answer in (_FIRST, _SECOND)]
        answered: set[int] = set()
        # The second connection may stand long after the first one; one that is never made lets the time run out.
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while answered != {1, 2}:
                answered |= set(await _answers(f"ipv4:{first},{second}"))


async def test_calls_to_a_name_go_on_when_one_of_its_addresses_ends() -> None:
    async with AsyncExitStack() as stack:
        first = await _served(stack, _FIRST)
        async with AsyncExitStack() as ended:
            gone = await _served(ended, _SECOND)
        assert await _answers(f"ipv4:{gone},{first}") == {1: _NUM_CALLS}


async def test_calls_to_one_peer_stay_with_it() -> None:
    async with AsyncExitStack() as stack:
        first = await _served(stack, _FIRST)
        assert await _answers(first) == {1: _NUM_CALLS}
        assert await _answers(f"dns:///{first}") == {1: _NUM_CALLS}
