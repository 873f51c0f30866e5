"""Where a load goes: a stack that runs, or one of its own, and texts that its tokenizer has as many tokens for as wanted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from bench.traffic.client import Endpoint, find_model, learn_server_words
from bench.traffic.options import say
from bench.traffic.stack import StackPlan, serve_stack
from bench.traffic.wording import Wording

__all__ = ["Place", "open_place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests go, and how they are written."""

    endpoint: Endpoint
    model: str
    wording: Wording


@asynccontextmanager
async def open_place(remote: Endpoint | None, stack: StackPlan) -> AsyncIterator[Place]:
    """`stack` is started where there is no `remote`.

    Raises:
        StackStartError: it does not come up.
        TrafficError: nobody answers there.
        WordingError: its tokenizer cannot be written for.
    """
    async with AsyncExitStack() as exits:
        endpoint = remote
        if endpoint is None:
            endpoint = await exits.enter_async_context(serve_stack(stack))
        model, context = await asyncio.to_thread(find_model, endpoint)
        words = await asyncio.to_thread(learn_server_words, endpoint, model)
        say(f"{endpoint.target.url}: {model}, context {context}; {len(words)} words of one token")
        yield Place(endpoint, model, Wording(words, 1))
