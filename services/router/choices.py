"""Several replies to one request: `n` choices of each of its prompts."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace

from services.router.domain.request import GenerationRequest
from services.router.reply import Done, ReplyEvent, Started

__all__ = ["ChoosingRouter"]

_SEEDS = 2**64


@dataclass(frozen=True, slots=True)
class _Single:
    """One choice as a request of its own. first: the first choice of its prompt has begun."""

    choice: int
    request: GenerationRequest
    first: asyncio.Event

    @property
    def is_first(self) -> bool:
        return self.choice % self.request.num_choices == 0


class ChoosingRouter:
    """Runs every choice as a request of its own, and gives their events as they come.

    Choices behind a prompt's first one begin when that one has been combined: they find the states that it has captured and
    its snapshots, and run the live tokens behind these again, in one sweep where the worker waits for several. A seed counts
    up from choice to choice.
    """

    def __init__(self, answer: Callable[[GenerationRequest], AsyncGenerator[ReplyEvent]]) -> None:
        self._answer = answer

    def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The choices' events; one `Started`, one `Done` a choice. What fails one fails all; all end with this generator.

        Raises:
            PromptError: a prompt can never be served.
            HypicError: see `Router`.
        """
        if request.num_replies == 1:
            return self._answer(request)
        return self._merge(list(_split(request)), request.num_at_once)

    async def _merge(self, singles: list[_Single], num_at_once: int) -> AsyncGenerator[ReplyEvent]:
        events: asyncio.Queue[ReplyEvent | Exception] = asyncio.Queue(num_at_once)
        room = asyncio.Semaphore(num_at_once)
        tasks = [asyncio.create_task(self._run(single, events, room)) for single in singles]
        num_left, has_started = len(singles), False
        try:
            while num_left:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                num_left -= isinstance(event, Done)
                if not isinstance(event, Started) or not has_started:
                    yield event
                has_started = True
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, single: _Single, events: "asyncio.Queue[ReplyEvent | Exception]", room: asyncio.Semaphore
    ) -> None:
        if not single.is_first:
            await single.first.wait()
        try:
            async with room, aclosing(self._answer(single.request)) as own:
                async for event in own:
                    if isinstance(event, Started):
                        single.first.set()
                    await events.put(event if isinstance(event, Started) else replace(event, choice=single.choice))
        except Exception as error:
            await events.put(error)


def _split(request: GenerationRequest) -> Iterator[_Single]:
    seed = request.sampling.seed
    for at, prompt in enumerate((request.prompt, *request.further_prompts)):
        first = asyncio.Event()
        for index in range(request.num_choices):
            sampling = replace(request.sampling, seed=None if seed is None else (seed + index) % _SEEDS)
            own = replace(request, prompt=prompt, further_prompts=(), sampling=sampling)
            yield _Single(at * request.num_choices + index, own, first)
