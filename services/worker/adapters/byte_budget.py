"""A bound on the bytes that transfers hold at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["ByteBudget"]


class ByteBudget:
    """Whoever asks for more than is left waits, first come first served. Lives on one event loop."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    @asynccontextmanager
    async def held(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold so many bytes inside. More than the whole budget are held when nobody else holds any."""
        async with self._turn:
            while self.held_bytes and self.held_bytes + num_bytes > self.capacity_bytes:
                self._released.clear()
                await self._released.wait()
            self.held_bytes += num_bytes
        try:
            yield
        finally:
            self.held_bytes -= num_bytes
            self._released.set()
