"""What a tenant has in flight, to the end of each reply, and in a minute; and what the workers bear."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from unittest.mock import Mock

import pytest

from services.common.errors import UnavailableError
from services.router.adapters.quotas import BoundedRouter, SheddingRouter, TenantRates
from services.router.domain.explain import Usage
from services.router.domain.rates import Rates, TooBusyError
from services.router.domain.request import GenerationRequest, Namespace, ReuseOptions, Sampling, TextPrompt
from services.router.domain.shedding import SheddingPolicy
from services.router.domain.workers import WorkerView
from services.router.reply import Delta, Done, ReplyEvent, Started
from tests.unit.router.test_shedding import view


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
    with pytest.raises(TooBusyError, match="quota of 2"):
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


class Answering:
    """Replies of a hundred tokens."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        yield Done(Mock(), Usage(90, 10, 0), Mock())


async def ask(router: BoundedRouter | SheddingRouter, asked: GenerationRequest) -> None:
    async for _ in router.generate(asked):
        pass


@pytest.mark.parametrize(("rates", "num_taken", "wait"), [(Rates(2, 0), 2, 30.0), (Rates(0, 150), 2, 20.4)])
async def test_a_minute_holds_so_much(rates: Rates, num_taken: int, wait: float) -> None:
    """Two requests; or 200 tokens, the second reply of which takes more than there are, so that 51 have to come back."""
    now = [0.0]
    router = BoundedRouter(Answering(), TenantRates(lambda: now[0]))
    asked = replace(request(most=0), rates=rates)
    for _ in range(num_taken):
        await ask(router, asked)
    with pytest.raises(TooBusyError) as refused:
        await ask(router, asked)
    assert refused.value.code == "tenant_limit"
    assert refused.value.retry_after_seconds == pytest.approx(wait)
    await ask(router, replace(request("other", most=0), rates=rates))
    now[0] += refused.value.retry_after_seconds - 0.1
    with pytest.raises(TooBusyError):
        await ask(router, asked)
    now[0] += 0.2
    await ask(router, asked)


async def test_a_refused_request_costs_nothing() -> None:
    now = [0.0]
    router = BoundedRouter(Answering(), TenantRates(lambda: now[0]))
    asked = replace(request(most=0), rates=Rates(1, 0))
    await ask(router, asked)
    for _ in range(50):
        with pytest.raises(TooBusyError):
            await ask(router, asked)
    now[0] += 60.1
    await ask(router, asked)


async def test_load_is_shed_while_it_lasts() -> None:
    views: list[WorkerView] = [view(backlog=90.0)]
    router = SheddingRouter(Answering(), lambda: views, SheddingPolicy(60.0, 8))
    with pytest.raises(TooBusyError, match="work for 90") as refused:
        await ask(router, request())
    assert (refused.value.code, refused.value.retry_after_seconds) == ("overloaded", 30.0)
    views[0] = view(backlog=1.0)
    await ask(router, request())
