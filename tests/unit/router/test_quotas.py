"""A tenant's requests in flight, counted to the end of each reply, however it ends."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from services.common.errors import OverloadedError, UnavailableError
from services.router.adapters.quotas import BoundedRouter
from services.router.domain.request import GenerationRequest, Namespace, ReuseOptions, Sampling, TextPrompt
from services.router.reply import Delta, ReplyEvent, Started


class Endless:
    """Replies without an end, or with a failure behind the first event."""

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        yield Started()
        if self._fails:
            raise UnavailableError("the worker died")
        while True:
            yield Delta(request.model)


def request(tenant: str = "acme", most: int = 2) -> GenerationRequest:
    return GenerationRequest("m", TextPrompt(("a",)), Sampling(), (), ReuseOptions(), Namespace(tenant), most)


async def test_more_than_the_quota_is_refused_until_one_ends() -> None:
    router = BoundedRouter(Endless())
    running = [router.generate(request()) for _ in range(2)]
    for reply in running:
        await anext(reply)
    with pytest.raises(OverloadedError, match="quota of 2"):
        await anext(router.generate(request()))
    await anext(router.generate(request("other")))
    await anext(router.generate(request(most=0)))
    await running[0].aclose()
    again = router.generate(request(most=3))
    await anext(again)


async def test_a_failed_or_cancelled_reply_gives_its_place_back() -> None:
    failing = BoundedRouter(Endless(fails=True))
    for _ in range(3):
        reply = failing.generate(request(most=1))
        await anext(reply)
        with pytest.raises(UnavailableError):
            await anext(reply)
    router = BoundedRouter(Endless())

    async def consume() -> None:
        async for _ in router.generate(request(most=1)):
            await asyncio.sleep(0)

    for _ in range(3):
        task = asyncio.create_task(consume())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
