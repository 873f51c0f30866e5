"""The worker's metrics. Names follow vLLM's words where the thing is the same."""

import time
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common import buckets
from services.worker.engine.loop import Engine
from services.worker.engine.requests import CaptureEvent, PrefilledEvent, Serving
from services.worker.engine.states import StoreEviction

__all__ = ["TokenGaps", "WorkerMetrics"]

# Waits for layers are counted by the part of the model's depth, so that a deep model has no more series than a flat one.
_EIGHTHS = 8


class WorkerMetrics:
    """Counters, gauges and histograms of one worker process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hypic_worker_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, bounds: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"hypic_worker_{name}_seconds", text, labels, buckets=bounds, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"hypic_worker_{name}", text, labels, registry=registry)

        self.prompt_tokens = counter(
            "prompt_tokens",
            "Prompt tokens by how they were served: live, captured, or reused (segment, prefix).",
            "served",
        )
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.fallbacks = counter("fallbacks", "Parts computed instead of reused, by reason.", "reason")
        self.captures = counter("captures", "Segments captured, by outcome.", "outcome")
        self.inter_token_seconds = seconds("inter_token_latency", "Between two tokens of a reply.", buckets.INTER_TOKEN)
        self.combine_seconds = seconds(
            "combine_time", "From admission to the first token, less the wait for layers.", buckets.STAGE
        )
        self.queue_seconds = seconds("request_queue_time", "From submission to admission.", buckets.REQUEST)
        self.capture_seconds = seconds(
            "capture_time", "One capture pass, from its first layer to its last.", buckets.STAGE
        )
        self.layer_wait_seconds = counter(
            "layer_wait_seconds",
            "For which prompts waited for a layer of a state on its way, by the eighth of the model's depth (1 to 8).",
            "eighth",
        )
        for eighth in range(1, _EIGHTHS + 1):
            self.layer_wait_seconds.labels(str(eighth))
        self.requests_running = gauge("num_requests_running", "Requests that combine or decode.")
        self.requests_waiting = gauge("num_requests_waiting", "Requests that wait for room.")
        self.cache_usage = gauge("kv_cache_usage_perc", "Part of the pages that somebody holds, 0 to 1.")
        self.pages_free = gauge("pages_free", "Pages nobody holds.")
        self.engine_seen = gauge(
            "engine_seen_timestamp_seconds", "When the engine last said what these gauges show; old while it hangs."
        )
        self.state_bytes = gauge("state_bytes", "Bytes of stored states, pages whole; of one rank.")
        self.evictions = counter(
            "evictions",
            "States that the engine's memory dropped by itself, for pages or for other states' planes, ahead of the directory.",
            "reason",
        )
        self.held_states = counter(
            "held_states",
            "Decode states held for another engine: taken; dropped (given up, or the time was up); refused for want of room.",
            "outcome",
        )
        for outcome in ("taken", "dropped", "refused"):
            self.held_states.labels(outcome)
        self._seen_evictions = dict.fromkeys(StoreEviction, 0)
        for reason in StoreEviction:
            self.evictions.labels(reason.value)
        self._add_tiers(counter, seconds, gauge)

    def _add_tiers(
        self, counter: Callable[..., Counter], seconds: Callable[..., Histogram], gauge: Callable[..., Gauge]
    ) -> None:
        self.tier_bytes = gauge("tier_bytes", "Bytes of stored blobs, by tier below the engine's memory.", "tier")
        self.fetch_seconds = seconds(
            "fetch_time", "One state into the engine's memory, by where it lay.", buckets.STAGE, "tier"
        )
        self.promotions = counter("promotions", "States brought into the engine's memory, by tier.", "tier")
        self.fetched_bytes = counter("fetched_bytes", "Bytes of those states, by tier.", "tier")
        self.failed_fetches = counter("failed_fetches", "States that did not come, by tier.", "tier")
        self.demotions = counter("demotions", "States written to a tier behind their publish.", "tier")
        self.corrupt_blobs = counter("corrupt_blobs", "Blobs whose bytes were not those written; removed.", "tier")

    def on_prefilled(self, event: PrefilledEvent, num_layers: int) -> None:
        """A prompt has been combined by a model of so many layers."""
        for part in event.parts:
            self.prompt_tokens.labels("live").inc(part.live_tokens)
            if part.serving is not Serving.LIVE:
                self.prompt_tokens.labels(part.serving.value).inc(part.reused_tokens)
                self.prompt_tokens.labels("captured").inc(part.captured_tokens)
            if part.reason:
                self.fallbacks.labels(part.reason).inc()
        self.combine_seconds.observe(event.combine_seconds)
        self.queue_seconds.observe(event.queue_seconds)
        for layer, waited in event.layer_waits.items():
            self.layer_wait_seconds.labels(str(layer * _EIGHTHS // num_layers + 1)).inc(waited)

    def on_capture(self, event: CaptureEvent) -> None:
        """A segment's capture has ended."""
        self.captures.labels("failed" if event.reason else "stored").inc()
        self.capture_seconds.observe(event.seconds)

    def on_fetched(self, tier: str, seconds: float, num_bytes: int) -> None:
        """A state has come from a tier, or from another worker (`same_host`, `other_host`)."""
        self.promotions.labels(tier).inc()
        self.fetched_bytes.labels(tier).inc(num_bytes)
        self.fetch_seconds.labels(tier).observe(seconds)

    def read_tiers(self, used_bytes: Mapping[str, int]) -> None:
        """Refresh the tiers' gauges."""
        for tier, used in used_bytes.items():
            self.tier_bytes.labels(tier).set(used)

    def read(self, engine: Engine) -> None:
        """Refresh the gauges; on the engine's thread."""
        self.engine_seen.set_to_current_time()
        self.requests_running.set(engine.num_running)
        self.requests_waiting.set(engine.num_waiting)
        self.state_bytes.set(engine.context.store.used_bytes)
        pages = engine.context.pages
        self.pages_free.set(pages.num_free)
        self.cache_usage.set(1 - pages.num_free / max(pages.num_pages, 1))
        for reason, count in engine.context.store.evictions.items():
            self.evictions.labels(reason.value).inc(count - self._seen_evictions[reason])
            self._seen_evictions[reason] = count


class TokenGaps:
    """Counts one reply's tokens, and the time between them."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._last = 0.0

    def note_token(self) -> None:
        """One has been generated."""
        now = time.monotonic()
        self._metrics.generation_tokens.inc()
        if self._last:
            self._metrics.inter_token_seconds.observe(now - self._last)
        self._last = now
