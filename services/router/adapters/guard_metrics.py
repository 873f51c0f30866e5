"""The guard's instruments; implements `GuardMetrics`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.router.domain.divergence import Comparison
from services.router.guard import SampleOutcome

__all__ = ["GuardInstruments"]

# Nats, from what rounding gives to another model's distribution.
_DIVERGENCE = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_AGREEMENT = (0.0, 0.25, 0.5, 0.75, 1.0)


class GuardInstruments:
    """In the router's registry. `tag` is one of at most 16: a configured tag, a tenant group, or `other`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        by_tag = ("model_name", "tag")
        self._divergence = Histogram(
            "hypic_guard_divergence_nats",
            "Of sampled requests: KL of the composed first token from that of a full recompute; a lower bound.",
            by_tag,
            buckets=_DIVERGENCE,
            registry=registry,
        )
        self._agreement = Histogram(
            "hypic_guard_agreement_ratio",
            "Of sampled requests: share of the first four greedy tokens that are those of a full recompute.",
            by_tag,
            buckets=_AGREEMENT,
            registry=registry,
        )
        self._samples = Counter(
            "hypic_guard_samples_total",
            "Sampled requests by what became of them: compared, or dropped (busy, full, not_composed, failed).",
            ("outcome",),
            registry=registry,
        )
        self._is_exact = Gauge(
            "hypic_guard_exact",
            "1 while requests of a tag are answered without composing, since it lost too much; else 0.",
            by_tag,
            registry=registry,
        )
        self._switches = Counter(
            "hypic_guard_switches_total",
            "Tags that changed: to exact (divergence), and back (recovery, new_model).",
            (*by_tag, "cause"),
            registry=registry,
        )
        for outcome in SampleOutcome:
            self._samples.labels(outcome.value)

    def count_sample(self, outcome: SampleOutcome) -> None:
        """See `GuardMetrics`."""
        self._samples.labels(outcome.value).inc()

    def observe(self, model: str, tag: str, sample: Comparison) -> None:
        """See `GuardMetrics`."""
        self._divergence.labels(model, tag).observe(sample.divergence)
        self._agreement.labels(model, tag).observe(sample.agreement)

    def set_mode(self, model: str, tag: str, *, is_exact: bool) -> None:
        """See `GuardMetrics`."""
        self._is_exact.labels(model, tag).set(is_exact)

    def count_switch(self, model: str, tag: str, cause: str) -> None:
        """See `GuardMetrics`."""
        self._switches.labels(model, tag, cause).inc()
