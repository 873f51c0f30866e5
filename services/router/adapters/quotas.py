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
    """Refuses what exceeds a tenant's requests in flight; a stream counts until it ends."""

    def __init__(self, inner: Generator) -> None:
        self._inner = inner
        self._running: Counter[str] = Counter()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The inner router's reply.

        Raises:
            OverloadedError: the tenant has as many requests under way as it may.
        """
        tenant, most = request.namespace.tenant, request.max_in_flight
        if most and self._running[tenant] >= most:
            raise OverloadedError(f"the tenant has {most} requests in flight, which is its quota")
        self._running[tenant] += 1
        try:
            async with aclosing(self._inner.generate(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
