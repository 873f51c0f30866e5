"""The answer to a plan whose caller is cancelled: its lease is given back, whenever it comes."""

import asyncio
from typing import Any

import pytest
from hypic.v1 import cache_pb2

from services.router.adapters.plan_stream import PlanStream


class Call:
    """The stream, whose answers the test gives."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[cache_pb2.PlanRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[cache_pb2.PlanResponse] = asyncio.Queue()

    async def write(self, request: cache_pb2.PlanRequest) -> None:
        self.written.put_nowait(request)

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> cache_pb2.PlanResponse:
        return await self.answers.get()


class Stub:
    def __init__(self) -> None:
        self.call = Call()

    def Plan(self) -> Call:  # noqa: N802 # the name is the protocol's
        return self.call


@pytest.mark.parametrize("own_lease", ["", "lease-0"])
@pytest.mark.parametrize("cancelled", ["before", "with", "after"])
async def test_the_lease_of_a_cancelled_plan_is_given_back_once(cancelled: str, own_lease: str) -> None:
    stub: Any = Stub()
    given_back: list[str] = []
    stream = PlanStream(stub, given_back.append)
    task = asyncio.create_task(stream.plan(cache_pb2.PlanRequest(lease_id=own_lease), 10.0))
    asked = await stub.call.written.get()
    response = cache_pb2.PlanResponse(call=asked.call, lease_id=own_lease or "lease-1")
    if cancelled == "before":
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    stub.call.answers.put_nowait(response)
    if cancelled == "with":
        # The answer is read before the caller's task learns that it is cancelled.
        task.cancel()
    elif cancelled == "after":
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(5):
        await asyncio.sleep(0)
    # A lease that was only extended is its request's to release.
    assert given_back == ([] if own_lease else ["lease-1"])
