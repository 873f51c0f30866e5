"""What one rate of arrivals led to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bench.traffic.record import Record

__all__ = ["KEPT_SHARE", "Level", "holds", "lead_seconds", "percentile", "summarise"]

# Of the requests, that have to keep a promise.
KEPT_SHARE = 0.95
# Of a level's time, at its start, when queues are still empty: its requests are not counted.
_LEAD_SHARE = 0.15
# A sender so late that it shows in a promise is no sender to measure by.
_LATE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Level:
    """Requests due behind the lead, `counted` of them, at a rate of `rate` a second over `seconds`.

    Seconds to first tokens are those of cut replies too, and infinite where none came; gaps are between pieces of a reply. drift:
    by how much the middle first token of the last third is later than that of the first third. tokens: of counted prompts, by
    how they were served. behind: the sender was late, so the level says nothing. metrics: of the stack, over the level.
    """

    rate: float
    seconds: float
    counted: int
    answered: int
    refused: int
    failed: int
    cut: int
    first_token_p50: float
    first_token_p95: float
    first_token_p99: float
    gap_p50: float
    gap_p95: float
    queue_p50: float
    queue_p95: float
    drift: float
    lag_p99: float
    behind: bool
    prompt_tokens_per_second: float
    answer_tokens_per_second: float
    goodput: Mapping[str, float]
    tokens: Mapping[str, int]
    metrics: Mapping[str, float]
    faults: Sequence[str]

    @property
    def cold_share(self) -> float:
        """Of prompt tokens that were captured for their request, or computed in place beyond seams and questions."""
        total = sum(self.tokens.values())
        return self.tokens["cold"] / total if total else 0.0

    def as_json(self) -> dict[str, Any]:
        """For a file: what is infinite is null."""
        return {name: _finite(value) for name, value in asdict(self).items()} | {"cold_share": self.cold_share}


def lead_seconds(seconds: float) -> float:
    """How much of a level comes before anything counts."""
    return _LEAD_SHARE * seconds


def holds(level: Level, promise: float) -> bool:
    """Whether 95 % had their first token within `promise` seconds, and times did not grow by more than a third of it: a rate
    that only keeps a promise because a queue has not filled yet is not sustained.
    """
    return level.counted > 0 and level.first_token_p95 <= promise and level.drift <= promise / 3 and not level.behind


def summarise(
    records: Sequence[Record], rate: float, seconds: float, promises: Sequence[float], metrics: Mapping[str, float]
) -> Level:
    """Of one level's records, by when they were due."""
    counted = [own for own in records if own.due >= lead_seconds(seconds)]
    answered = [own for own in counted if own.is_answered]
    times = sorted(_first_token(own) for own in counted)
    gaps = sorted(gap for own in answered for gap in own.gaps)
    queues = sorted(own.queue_seconds for own in answered)
    lags = sorted(own.lag for own in records)
    window = max(seconds - lead_seconds(seconds), 1e-9)
    kept = {f"{promise:g}": sum(time <= promise for time in times) / window for promise in promises}
    served = [own.served for own in answered]
    failed = [own for own in counted if not (own.is_answered or own.is_refused or own.is_cut)]
    return Level(
        rate=rate,
        seconds=seconds,
        counted=len(counted),
        answered=len(answered),
        refused=sum(own.is_refused for own in counted),
        failed=len(failed),
        cut=sum(own.is_cut for own in counted),
        first_token_p50=percentile(times, 0.5),
        first_token_p95=percentile(times, KEPT_SHARE),
        first_token_p99=percentile(times, 0.99),
        gap_p50=percentile(gaps, 0.5),
        gap_p95=percentile(gaps, 0.95),
        queue_p50=percentile(queues, 0.5),
        queue_p95=percentile(queues, 0.95),
        drift=_drift(counted),
        lag_p99=percentile(lags, 0.99),
        behind=percentile(lags, 0.99) > _LATE_SECONDS,
        prompt_tokens_per_second=sum(own.total for own in served) / _span(answered, window),
        answer_tokens_per_second=sum(own.answer_tokens for own in answered) / _span(answered, window),
        goodput=kept,
        tokens={kind: sum(getattr(own, kind) for own in served) for kind in ("prefix", "hit", "cold", "live")},
        metrics=dict(metrics),
        faults=list(dict.fromkeys(own.fault for own in failed))[:5],
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that so large a share of rising values does not exceed; 0 of none."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0


def _first_token(record: Record) -> float:
    if record.first_token is None or not (record.is_answered or record.is_cut):
        return math.inf
    return record.first_token


def _drift(counted: Sequence[Record]) -> float:
    third = len(counted) // 3
    times = [_first_token(own) for own in counted]
    if third < 3:
        return 0.0
    early, late = median(times[:third]), median(times[-third:])
    return 0.0 if math.isinf(early) and math.isinf(late) else late - early


def _span(answered: Sequence[Record], window: float) -> float:
    """From when the first was due until the last had ended: an overloaded server answers long behind the last arrival."""
    ends = [own.due + own.end for own in answered if own.end is not None]
    return max(window, max(ends) - answered[0].due) if ends else window


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
