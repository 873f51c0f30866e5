"""The worker's metrics. Names follow vLLM's words where the thing is the same."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.worker.engine.loop import Engine
from services.worker.engine.requests import CaptureEvent, PrefilledEvent, Serving

__all__ = ["WorkerMetrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class WorkerMetrics:
    """Counters, gauges and histograms of one worker process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hypic_worker_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"hypic_worker_{name}_seconds", text, labels, buckets=_SECONDS, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"hypic_worker_{name}", text, labels, registry=registry)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens by how they were served.", "served")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.fallbacks = counter("fallbacks", "Parts computed instead of reused, by reason.", "reason")
        self.captures = counter("captures", "Segments captured, by outcome.", "outcome")
        self.combine_seconds = seconds("combine_time", "From admission to the first token.")
        self.queue_seconds = seconds("request_queue_time", "From submission to admission.")
        self.capture_seconds = seconds("capture_time", "One capture pass, from its first layer to its last.")
        self.requests_running = gauge("num_requests_running", "Requests that combine or decode.")
        self.requests_waiting = gauge("num_requests_waiting", "Requests that wait for room.")
        self.state_bytes = gauge("state_bytes", "Bytes of stored states, pages whole; of one rank.")
        self.pages_free = gauge("pages_free", "Pages nobody holds.")
        self.tier_bytes = gauge("tier_bytes", "Bytes of stored blobs, by tier below the engine's memory.", "tier")
        self.fetch_seconds = seconds("fetch_time", "One state into the engine's memory, by where it lay.", "tier")
        self.promotions = counter("promotions", "States brought into the engine's memory, by tier.", "tier")
        self.fetched_bytes = counter("fetched_bytes", "Bytes of those states, by tier.", "tier")
        self.failed_fetches = counter("failed_fetches", "States that did not come, by tier.", "tier")
        self.demotions = counter("demotions", "States written to a tier behind their publish.", "tier")
        self.corrupt_blobs = counter("corrupt_blobs", "Blobs whose bytes were not those written; removed.", "tier")

    def on_prefilled(self, event: PrefilledEvent) -> None:
        """A prompt has been combined."""
        for part in event.parts:
            self.prompt_tokens.labels("live").inc(part.live_tokens)
            if part.serving is not Serving.LIVE:
                self.prompt_tokens.labels(part.serving.value).inc(part.reused_tokens)
                self.prompt_tokens.labels("captured").inc(part.captured_tokens)
            if part.reason:
                self.fallbacks.labels(part.reason).inc()
        self.combine_seconds.observe(event.combine_seconds)
        self.queue_seconds.observe(event.queue_seconds)

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
        self.requests_running.set(engine.num_running)
        self.requests_waiting.set(engine.num_waiting)
        self.state_bytes.set(engine.context.store.used_bytes)
        self.pages_free.set(engine.context.pages.num_free)
