"""Metrics as a decorator round the router: names and buckets are vLLM's where the thing is the same."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.router.adapters.http_errors import http_error
from services.router.domain.explain import Explanation
from services.router.domain.parts import Reason
from services.router.domain.plan import CaptureCause, Served
from services.router.domain.request import GenerationRequest
from services.router.reply import Done, ReplyEvent, Started

__all__ = ["Generator", "MeteredRouter", "RouterMetrics"]

_TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
# What a client or the plan chose is no fallback.
_CHOSEN = {
    Reason.REUSE_OFF, Reason.REUSE_EXACT, Reason.FIRST_USE, Reason.TOO_SHORT, Reason.LAST_PART, Reason.NOT_MARKED,
}  # fmt: skip


class Generator(Protocol):
    """Whatever answers requests."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The reply as it comes."""
        ...


WorkerStates = Callable[[], Mapping[tuple[str, str], int]]


class _WorkerGauge(Collector):
    """Asked when metrics are read."""

    def __init__(self, states: WorkerStates) -> None:
        self._states = states

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See `Collector`."""
        gauge = GaugeMetricFamily(
            "hypic_workers",
            "Workers by role (a worker with two counts twice) and state, as this router sees them.",
            labels=("role", "state"),
        )
        for labels, count in sorted(self._states().items()):
            gauge.add_metric(labels, count)
        yield gauge


class RouterMetrics:
    """The router's instruments in one registry."""

    def __init__(self, registry: CollectorRegistry, worker_states: WorkerStates = dict) -> None:
        self.registry = registry
        registry.register(_WorkerGauge(worker_states))
        self.captures = Counter(
            "hypic_captures_total",
            "Segments that workers were asked to capture: assigned, retried after a failure, or hedged when late.",
            ["cause", "outcome"],
            registry=registry,
        )
        self.fetches = Counter(
            "hypic_fetched_parts_total",
            "Parts whose state the combining worker fetched.",
            ["source"],
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "hypic_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_TIME_TO_FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.latency = Histogram(
            "hypic_e2e_request_latency_seconds",
            "From a request's arrival to the end of its reply.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.running = Gauge("hypic_num_requests_running", "Requests in the router.", registry=registry)
        self.success = Counter(
            "hypic_request_success_total", "Replies that ended well.", ["finish_reason"], registry=registry
        )
        self.errors = Counter("hypic_request_errors_total", "Failed requests.", ["code"], registry=registry)
        self.prompt_tokens = Counter(
            "hypic_prompt_tokens_total",
            "Prompt tokens: reused from a prefix snapshot or a hit, captured for the request (cold), or live.",
            ["served"],
            registry=registry,
        )
        self.generation_tokens = Counter("hypic_generation_tokens_total", "Generated tokens.", registry=registry)
        self.fallbacks = Counter(
            "hypic_fallbacks_total", "Parts computed although reuse was meant.", ["reason"], registry=registry
        )

    def count_capture(self, cause: CaptureCause, is_stored: bool) -> None:
        """A capture ahead of a reply, or behind one, has ended."""
        self.captures.labels(cause.value, "stored" if is_stored else "failed").inc()

    def count_error(self, error: Exception) -> None:
        """A request failed before or inside its reply."""
        self.errors.labels(http_error(error).code or "unknown").inc()

    def count_done(self, done: Done) -> None:
        """A reply ended well."""
        self.success.labels(done.reason.value).inc()
        self.generation_tokens.inc(done.usage.completion_tokens)
        self._count_parts(done.explanation)

    def _count_parts(self, explanation: Explanation) -> None:
        for part in explanation.parts:
            self.prompt_tokens.labels(Served.LIVE.value).inc(part.live_tokens)
            self.prompt_tokens.labels(Served.COLD.value).inc(part.captured_tokens)
            reused_from = Served.PREFIX if part.served is Served.PREFIX else Served.HIT
            self.prompt_tokens.labels(reused_from.value).inc(part.reused_tokens)
            if part.fetch is not None:
                self.fetches.labels("worker" if part.fetch.worker else "tier").inc()
            if part.reason and part.reason not in _CHOSEN:
                known = part.reason if part.reason in set(Reason) else "other"
                self.fallbacks.labels(str(known)).inc()


class MeteredRouter:
    """Measures what passes through a router."""

    def __init__(self, inner: Generator, metrics: RouterMetrics) -> None:
        self._inner = inner
        self._metrics = metrics

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The inner router's reply, measured."""
        arrival = time.monotonic()
        with self._metrics.running.track_inprogress():
            try:
                async with aclosing(self._inner.generate(request)) as events:
                    async for event in events:
                        if isinstance(event, Started):
                            self._metrics.time_to_first_token.observe(time.monotonic() - arrival)
                        elif isinstance(event, Done):
                            self._metrics.count_done(event)
                            self._metrics.latency.observe(time.monotonic() - arrival)
                        yield event
            except Exception as error:
                self._metrics.count_error(error)
                raise
