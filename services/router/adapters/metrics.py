"""Metrics as a decorator round the router: names and buckets are vLLM's where the thing is the same."""

import time
from collections import Counter as TokenCounts
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common import buckets
from services.router.adapters.http_errors import http_error
from services.router.domain.explain import PartExplanation
from services.router.domain.parts import PartKind, Reason
from services.router.domain.plan import CaptureCause, Served
from services.router.domain.request import GenerationRequest
from services.router.domain.tenancy import OTHER_TENANTS
from services.router.domain.turn import TurnEnd
from services.router.reply import Done, ReplyEvent, Started

__all__ = ["Generator", "MeteredRouter", "RouterMetrics"]

# What a client or the plan chose is no fallback.
_CHOSEN = {
    Reason.REUSE_OFF, Reason.REUSE_EXACT, Reason.FIRST_USE, Reason.TOO_SHORT, Reason.LAST_PART, Reason.NOT_MARKED,
    Reason.REFRESHED,
}  # fmt: skip
# Those that workers give, beside the router's own: labels stay few whatever a worker says.
_REASONS = {
    *Reason, "blob_damaged", "blob_foreign", "blob_missing", "fetch_failed", "fetch_timeout", "tier_unreachable",
    "worker_unreachable",
}  # fmt: skip
_STAGES = {
    "plan": ("Asking the directory what is stored.", buckets.STAGE),
    "capture": ("Waiting for captures ahead of the combine, also others'.", buckets.STAGE),
    "queue": ("Waiting in the worker for room.", buckets.REQUEST),
    "fetch": ("Waiting in the worker for layers of states that came from elsewhere.", buckets.STAGE),
    "combine": ("From admission in the worker to the first token, less the wait for layers.", buckets.STAGE),
    "decode": ("From the first token to the last.", buckets.REQUEST),
}


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

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """See `Collector`."""
        yield self._family()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See `Collector`."""
        gauge = self._family()
        for labels, count in sorted(self._states().items()):
            gauge.add_metric(labels, count)
        yield gauge

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(
            "hypic_workers",
            "Workers by role (a worker with two counts twice) and state, as this router sees them.",
            labels=("role", "state"),
        )


class RouterMetrics:
    """The router's instruments in one registry.

    tenant_groups: the group of each tenant that has one; metrics name no tenant, and every other one is `other`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        worker_states: WorkerStates = dict,
        tenant_groups: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.registry = registry
        self._tenant_groups = tenant_groups
        registry.register(_WorkerGauge(worker_states))
        self._add_times(registry)
        self._add_counts(registry)

    def _add_times(self, registry: CollectorRegistry) -> None:
        def seconds(name: str, text: str, bounds: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"hypic_{name}_seconds", text, labels, buckets=bounds, registry=registry)

        self.time_to_first_token = seconds(
            "time_to_first_token",
            "From a request's arrival to its first token.",
            buckets.TIME_TO_FIRST_TOKEN,
            "tenant_group",
        )
        self.latency = seconds(
            "e2e_request_latency", "From a request's arrival to the end of its reply.", buckets.REQUEST
        )
        self.time_per_output_token = seconds(
            "request_time_per_output_token", "Of a reply's tokens behind the first, on average.", buckets.INTER_TOKEN
        )
        self._stages = {name: seconds(f"request_{name}_time", text, bounds) for name, (text, bounds) in _STAGES.items()}

    def _add_counts(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hypic_{name}_total", text, labels, registry=registry)

        self.running = Gauge("hypic_num_requests_running", "Requests in the router.", registry=registry)
        self.success = counter("request_success", "Replies that ended well.", "finish_reason", "tenant_group")
        self.errors = counter("request_errors", "Failed requests.", "code")
        self.prompt_tokens = counter(
            "prompt_tokens",
            "Prompt tokens: reused from a prefix snapshot or a hit, captured for the request (cold), or live.",
            "served",
            "tenant_group",
        )
        self.reused_tokens = counter(
            "reused_tokens",
            "Those of the prompt tokens that were reused, by the tier that had them; of other workers `same_host`, `other_host`.",
            "tier",
        )
        self.seam_tokens = counter("seam_tokens", "Live tokens of composed segments: their seam windows.")
        self.refreshed_tokens = counter(
            "refreshed_tokens", "Live tokens of composed segments that a refresh recomputed in place."
        )
        self.generation_tokens = counter("generation_tokens", "Generated tokens.", "tenant_group")
        self.fallbacks = counter("fallbacks", "Parts computed although reuse was meant.", "reason")
        self.captures = counter(
            "captures",
            "Segments that workers were asked to capture: assigned, retried after a failure, or hedged when late.",
            "cause",
            "outcome",
        )
        self.single_flighted = counter(
            "single_flighted_captures",
            "Parts that another request was capturing, by what became of them: its state was waited for (hit), or not.",
            "served",
        )
        self.handovers = counter(
            "handovers",
            "Replies that another engine was to write, by what it began from: the composed state, the prompt, which it computed"
            " itself, or no engine was there (worker).",
            "began_from",
        )
        self.turns = counter(
            "turns",
            "Replies in a conversation, by what became of the state behind them: kept for the next turn, or why not.",
            "end",
        )
        self.fetches = counter("fetched_parts", "Parts whose state the combining worker fetched.", "source")

    def group_of(self, tenant: str) -> str:
        """The group that metrics name in a tenant's place."""
        return self._tenant_groups.get(tenant, OTHER_TENANTS)

    def count_capture(self, cause: CaptureCause, is_stored: bool) -> None:
        """A capture ahead of a reply, or behind one, has ended."""
        self.captures.labels(cause.value, "stored" if is_stored else "failed").inc()

    def count_turn(self, end: TurnEnd) -> None:
        """The state behind a reply was kept, or not."""
        self.turns.labels(end.value).inc()

    def count_error(self, error: Exception) -> None:
        """A request failed before or inside its reply."""
        self.errors.labels(http_error(error).code or "unknown").inc()

    def count_done(self, done: Done, group: str) -> None:
        """A reply ended well."""
        self.success.labels(done.reason.value, group).inc()
        self.generation_tokens.labels(group).inc(done.usage.completion_tokens)
        self._observe_seconds(done)
        for served, tokens in _tokens_by_serving(done.explanation.parts).items():
            self.prompt_tokens.labels(served.value, group).inc(tokens)
        self._count_reuse(done.explanation.parts)
        if (decode := done.explanation.decode) is not None:
            self.handovers.labels(decode.began_from).inc()

    def _observe_seconds(self, done: Done) -> None:
        seconds = done.explanation.seconds
        for name, stage in self._stages.items():
            stage.observe(getattr(seconds, name))
        later_tokens = done.usage.completion_tokens - 1
        if later_tokens > 0:
            self.time_per_output_token.observe(seconds.decode / later_tokens)

    def _count_reuse(self, parts: Sequence[PartExplanation]) -> None:
        """Of a whole prompt where many parts count alike: looking an instrument up takes longer than adding."""
        by_tier: TokenCounts[str] = TokenCounts()
        seam_tokens = refreshed_tokens = 0
        for part in parts:
            if part.reused_tokens:
                by_tier[part.tier or "unknown"] += part.reused_tokens
            if part.kind is PartKind.SEGMENT and part.served in (Served.HIT, Served.COLD):
                seam_tokens += part.live_tokens - part.refreshed_tokens
                refreshed_tokens += part.refreshed_tokens
            self._count_part(part)
        for tier, tokens in by_tier.items():
            self.reused_tokens.labels(tier).inc(tokens)
        self.seam_tokens.inc(seam_tokens)
        self.refreshed_tokens.inc(refreshed_tokens)

    def _count_part(self, part: PartExplanation) -> None:
        if part.planned is Served.PENDING:
            self.single_flighted.labels(part.served.value).inc()
        if part.fetch is not None:
            self.fetches.labels("worker" if part.fetch.worker else "tier").inc()
        if part.reason and part.reason not in _CHOSEN:
            known = part.reason if part.reason in _REASONS else "other"
            self.fallbacks.labels(str(known)).inc()


def _tokens_by_serving(parts: Iterable[PartExplanation]) -> Mapping[Served, int]:
    """Of a whole prompt: looking an instrument up takes longer than adding."""
    tokens = {Served.LIVE: 0, Served.COLD: 0}
    for part in parts:
        reused_from = Served.PREFIX if part.served is Served.PREFIX else Served.HIT
        tokens[Served.LIVE] += part.live_tokens
        tokens[Served.COLD] += part.captured_tokens
        tokens[reused_from] = tokens.get(reused_from, 0) + part.reused_tokens
    return tokens


class MeteredRouter:
    """Measures what passes through a router."""

    def __init__(self, inner: Generator, metrics: RouterMetrics) -> None:
        self._inner = inner
        self._metrics = metrics

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        """The inner router's reply, measured."""
        arrival = time.monotonic()
        group = self._metrics.group_of(request.namespace.tenant)
        with self._metrics.running.track_inprogress():
            try:
                async with aclosing(self._inner.generate(request)) as events:
                    async for event in events:
                        if isinstance(event, Started):
                            self._metrics.time_to_first_token.labels(group).observe(time.monotonic() - arrival)
                        elif isinstance(event, Done):
                            self._metrics.count_done(event, group)
                            self._metrics.latency.observe(time.monotonic() - arrival)
                        yield event
            except Exception as error:
                self._metrics.count_error(error)
                raise
