"""Several replies to one request: how many at a time, in which order, and how they end."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from services.common.errors import UnavailableError
from services.router.adapters.quotas import BoundedRouter
from services.router.choices import ChoosingRouter
from services.router.domain.explain import Usage
from services.router.domain.ports import FinishReason
from services.router.domain.request import GenerationRequest, Namespace, ReuseOptions, Sampling, TextPrompt
from services.router.reply import Delta, Done, ReplyEvent, Started

PROMPTS = ("a", "b", "c")
DONE = Done(FinishReason.STOP, Usage(1, 1, 0), None)  # type: ignore[arg-type] # nobody explains


class Inner:
    """Replies with its prompt and seed. fails: the seed of the choice that does."""

    def __init__(self, fails: int = -1) -> None:
        self._fails = fails
        self.running = self.most = 0
        self.begun: list[str] = []

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        assert isinstance(request.prompt, TextPrompt)
        name = f"{request.prompt.pieces[0]}{request.sampling.seed}"
        self.running += 1
        self.most = max(self.most, self.running)
        self.begun.append(name)
        try:
            await asyncio.sleep(0)
            yield Started()
            await asyncio.sleep(0)
            if request.sampling.seed == self._fails:
                raise UnavailableError("the worker died")
            yield Delta(name)
            await asyncio.sleep(0)
            yield DONE
        finally:
            self.running -= 1


def asked(num_choices: int, max_in_flight: int = 0) -> GenerationRequest:
    first, *further = (TextPrompt((prompt,)) for prompt in PROMPTS)
    plain = GenerationRequest("m", first, Sampling(seed=7), (), ReuseOptions(), Namespace("acme"), max_in_flight)
    return replace(plain, num_choices=num_choices, further_prompts=tuple(further))


@pytest.mark.parametrize(("num_choices", "max_in_flight", "most"), [(2, 0, 6), (16, 0, 16), (16, 5, 5), (1, 1, 1)])
async def test_every_choice_comes_and_no_more_run_than_may(num_choices: int, max_in_flight: int, most: int) -> None:
    inner = Inner()
    router = BoundedRouter(ChoosingRouter(inner.generate))
    events = [event async for event in router.generate(asked(num_choices, max_in_flight))]
    said = {event.choice: event.text for event in events if isinstance(event, Delta)}
    assert said == {
        at * num_choices + index: f"{prompt}{7 + index}"
        for at, prompt in enumerate(PROMPTS)
        for index in range(num_choices)
    }
    assert {event.choice for event in events if isinstance(event, Done)} == set(said)
    assert sum(isinstance(event, Started) for event in events) == 1
    assert inner.most == most
    assert inner.begun[:1] == ["a7"]
    assert inner.running == 0


async def test_what_fails_one_fails_all_and_nothing_goes_on() -> None:
    inner = Inner(fails=8)
    with pytest.raises(UnavailableError):
        _ = [event async for event in ChoosingRouter(inner.generate).generate(asked(3))]
    assert inner.running == 0


async def test_a_caller_that_goes_ends_all() -> None:
    inner = Inner()
    events = ChoosingRouter(inner.generate).generate(asked(4))
    await anext(events)
    await events.aclose()
    assert inner.running == 0


async def test_replies_at_a_time_count_in_the_tenants_bound() -> None:
    inner = Inner()
    router = BoundedRouter(ChoosingRouter(inner.generate))
    running = router.generate(asked(1, max_in_flight=4))
    await anext(running)
    with pytest.raises(Exception, match="quota of 4"):
        await anext(router.generate(asked(1, max_in_flight=4)))
    single = replace(asked(1, max_in_flight=4), further_prompts=())
    assert [event async for event in router.generate(single)]
    await running.aclose()
    assert [event async for event in router.generate(asked(1, max_in_flight=4))]
