"""Hit ratios of the eviction policies, on synthetic traces and on whatever traces are given."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.results import Row
from services.cache.domain.eviction import POLICIES
from services.cache.domain.values import Limits
from services.cache.replay import Costs, distinct_bytes, replay
from services.cache.traces import RAGPULSE_LIKE, TraceRequest, TraceShape, draw_trace, read_trace

__all__ = ["CHURNING", "load_traces", "measure_policies"]

_SHARES = (0.05, 0.1, 0.2)
CHURNING = TraceShape(requests=4000, documents=2000, churn=0.01, once=1)


def load_traces(paths: Sequence[Path]) -> dict[str, tuple[TraceRequest, ...]]:
    """Synthetic traces by name, and those of files or folders by theirs."""
    drawn = {"like RAGPulse": draw_trace(RAGPULSE_LIKE, seed=1), "Zipf with churn": draw_trace(CHURNING, seed=1)}
    return drawn | {path.stem: read_trace(path) for path in paths}


def measure_policies(traces: Mapping[str, Sequence[TraceRequest]]) -> Iterator[Row]:
    """Shares of tokens that were there, by capacity as a share of all states' bytes; then what waiting for a second use does."""
    costs = Costs()
    for name, trace in traces.items():
        all_bytes = distinct_bytes(trace, costs)
        for share in _SHARES:
            budget = int(share * all_bytes)
            at = f"{name}, room for {share:.0%}"
            first = {policy: replay(trace, score, Limits(budget), costs) for policy, score in POLICIES.items()}
            for policy, result in first.items():
                yield Row(f"hit tokens, {policy}, {at}", 100 * result.token_ratio, "%")
            later = replay(trace, POLICIES["gdsf"], Limits(budget, min_uses=2), costs)
            yield Row(f"hit tokens, gdsf with min_uses 2, {at}", 100 * later.token_ratio, "%")
            gain = 100 * (later.saved_seconds / first["gdsf"].saved_seconds - 1)
            yield Row(f"seconds saved, gdsf with min_uses 2 over 1, {at}", gain, "%")
