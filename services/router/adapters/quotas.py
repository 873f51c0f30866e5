"""Bounds of what a tenant may have under way, as a decorator round the router."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from services.common.errors import OverloadedError
from services.router.adapters.metrics import Generator
from services.router.domain.request import GenerationRequest
from services.router.reply import ReplyEvent

__all__ = ["BoundedRouter"]


class BoundedRouter:
    """Refuses what exceeds a tenant's requests in flight; a stream counts until it ends, as often as it has replies at a time."""

    def __init__(self, inner: Generator) -> None:
        self._inner = inner
        self._running: Counter[str] = Counter()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The inner router's reply.

        Raises:
            OverloadedError: the tenant has as many requests under way as it may.
        """
        tenant, most, count = request.namespace.tenant, request.max_in_flight, request.num_at_once
        if most and self._running[tenant] + count > most:
            raise OverloadedError(f"the tenant would have more than its quota of {most} requests in flight")
        self._running[tenant] += count
        try:
            async with aclosing(self._inner.generate(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._running[tenant] -= count
            if not self._running[tenant]:
                del self._running[tenant]
