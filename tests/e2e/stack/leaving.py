"""Clients that go away at any moment."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx2

from tests.e2e.stack.asking import CHAT, Asked, body

__all__ = ["leave_anywhere"]


def leave_anywhere(
    stack: Asked, documents: Sequence[dict[str, str]], count: int, longest_seconds: float = 0.25
) -> list[int]:
    """Send requests of every kind about some of the documents; the status of each, 0 where the client left before it came.

    Twelve at once have eight connections, so that some leave while they wait for one.
    """
    source, turns = random.Random(3), asyncio.Semaphore(12)

    def draw_request() -> dict[str, Any]:
        asked = source.sample(documents, source.randint(0, 3))
        modes = {
            "reuse": source.choice(["compose", "compose", "exact", "off"]),
            "cold": source.choice(["parallel", "live"]),
        }
        return body(stack, asked, max_tokens=source.choice([2, 300]), stream=source.random() < 0.5, **modes)

    async def leave_somewhere(client: httpx2.AsyncClient, request: dict[str, Any], seconds: float) -> int:
        async with turns:
            try:
                async with asyncio.timeout(seconds):
                    return (await client.post(CHAT, json=request)).status_code
            except TimeoutError:
                return 0

    async def run() -> list[int]:
        limits = httpx2.Limits(max_connections=8)
        async with httpx2.AsyncClient(base_url=stack.base_url, limits=limits, timeout=60) as client:
            draws = [(draw_request(), source.uniform(0.0, longest_seconds)) for _ in range(count)]
            return await asyncio.gather(*(leave_somewhere(client, *draw) for draw in draws))

    return asyncio.run(run())
