"""What a run amounts to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from services.simulator.cluster import Run, Setting

__all__ = ["Report", "jain_index", "percentile", "report"]


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one run.

    makespan_seconds: from the first arrival to the last first token; mean_seconds to p99_seconds: times to first token;
    utilisation: of all workers' time, that sweeps took, and the least and most of any worker; slowdown: a request's time to first
    token over its `alone_seconds`; fairness: Jain's index of slowdowns, 1 where all wait alike, 1/n where one
    of n does all the waiting. Tokens of segments are hits, captured for another request at that time (pending), or cold.
    """

    workers: int
    order: str
    pipelining: bool
    requests: int
    makespan_seconds: float
    mean_seconds: float
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    utilisation: float
    least_utilisation: float
    most_utilisation: float
    fairness: float
    mean_slowdown: float
    max_slowdown: float
    hit_tokens: int
    pending_tokens: int
    cold_tokens: int
    captures: int
    evictions: int

    @property
    def hit_ratio(self) -> float:
        """Tokens of segments that were there."""
        return self.hit_tokens / max(self.hit_tokens + self.pending_tokens + self.cold_tokens, 1)


def report(run: Run, setting: Setting) -> Report:
    """The figures of a run with at least one request."""
    times = sorted(served.first_token_seconds for served in run.served)
    slowdowns = [served.first_token_seconds / served.alone_seconds for served in run.served]
    busy = [seconds / run.end for seconds in run.busy_seconds]
    return Report(
        workers=setting.num_workers,
        order=setting.order.value,
        pipelining=setting.is_pipelined,
        requests=len(times),
        makespan_seconds=run.end,
        mean_seconds=fmean(times),
        p50_seconds=percentile(times, 0.5),
        p90_seconds=percentile(times, 0.9),
        p99_seconds=percentile(times, 0.99),
        utilisation=fmean(busy),
        least_utilisation=min(busy),
        most_utilisation=max(busy),
        fairness=jain_index(slowdowns),
        mean_slowdown=fmean(slowdowns),
        max_slowdown=max(slowdowns),
        hit_tokens=run.counts.hit_tokens,
        pending_tokens=run.counts.pending_tokens,
        cold_tokens=run.counts.cold_tokens,
        captures=run.counts.captures,
        evictions=run.counts.evictions,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that so large a share of rising values does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def jain_index(values: Sequence[float]) -> float:
    """(Σx)² / (n Σx²) of positive values (Jain and others, 1984)."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))
