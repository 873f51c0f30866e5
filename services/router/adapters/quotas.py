"""Bounds of what a tenant may have under way and ask for in a minute, and of what the workers bear, round the router."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from services.router.adapters.metrics import Generator
from services.router.domain.rates import Bucket, Rates, TooBusyError, refill, seconds_until, spend
from services.router.domain.request import GenerationRequest
from services.router.domain.shedding import SheddingPolicy, shed
from services.router.domain.workers import WorkerView
from services.router.reply import Done, ReplyEvent

__all__ = ["BoundedRouter", "SheddingRouter", "TenantRates"]

_TENANT = "tenant_limit"


class TenantRates:
    """Buckets by tenant; `clock` in seconds. Tenants are those of the key file, so that there are few."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def admit(self, tenant: str, rates: Rates) -> None:
        """Count a request.

        Raises:
            TooBusyError: it comes too soon. Tokens are counted behind a reply: one that took more than there was is made up for.
        """
        now = self._clock()
        if rates.tokens_per_minute:
            bucket = self._tokens[tenant] = refill(self._tokens.get(tenant), rates.tokens_per_minute, now)
            wait = seconds_until(bucket, rates.tokens_per_minute, 1)
            if wait:
                raise TooBusyError(f"the tenant may use {rates.tokens_per_minute} tokens a minute", wait, _TENANT)
        if rates.requests_per_minute:
            bucket = self._requests[tenant] = refill(self._requests.get(tenant), rates.requests_per_minute, now)
            wait = seconds_until(bucket, rates.requests_per_minute, 1)
            if wait:
                raise TooBusyError(f"the tenant may send {rates.requests_per_minute} requests a minute", wait, _TENANT)
            self._requests[tenant] = spend(bucket, 1)

    def count_tokens(self, tenant: str, rates: Rates, num_tokens: int) -> None:
        """A reply has taken so many, of its prompt and its own."""
        if rates.tokens_per_minute:
            now = self._clock()
            self._tokens[tenant] = spend(refill(self._tokens.get(tenant), rates.tokens_per_minute, now), num_tokens)


class BoundedRouter:
    """Refuses what exceeds a tenant's requests in flight or in a minute; a stream counts until it ends, once for every reply
    that it has at a time.
    """

    def __init__(self, inner: Generator, rates: TenantRates | None = None) -> None:
        self._inner = inner
        self._rates = rates or TenantRates()
        self._running: Counter[str] = Counter()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The inner router's reply.

        Raises:
            TooBusyError: the tenant has as many requests under way, or has sent as many in a minute, as it may.
        """
        tenant, most, count = request.namespace.tenant, request.max_in_flight, request.num_at_once
        if most and self._running[tenant] + count > most:
            raise TooBusyError(f"the tenant would have more than its quota of {most} requests in flight", 1.0, _TENANT)
        self._rates.admit(tenant, request.rates)
        self._running[tenant] += count
        try:
            async with aclosing(self._inner.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Done):
                        used = event.usage.prompt_tokens + event.usage.completion_tokens
                        self._rates.count_tokens(tenant, request.rates, used)
                    yield event
        finally:
            self._running[tenant] -= count
            if not self._running[tenant]:
                del self._running[tenant]


class SheddingRouter:
    """Refuses a request that every worker would let wait too long."""

    def __init__(self, inner: Generator, views: Callable[[], Sequence[WorkerView]], policy: SheddingPolicy) -> None:
        self._inner = inner
        self._views = views
        self._policy = policy

    def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The inner router's reply.

        Raises:
            TooBusyError: the workers have too much to do.
        """
        if too_much := shed(self._views(), self._policy):
            raise TooBusyError(too_much.reason, too_much.retry_after_seconds, "overloaded")
        return self._inner.generate(request)
