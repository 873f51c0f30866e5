"""When a tag's composed answers are too far from a full recompute to go on, and when they may come back: pure and sequential.

The statistic is a divergence in units of twelve budgets, cut at 1: `x` in [0, 1], so that the budget is 1/12 and no single
sample decides. Evidence is a wager (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2024):
against "the mean of x is at most b" a capital grows by `1 + λ (x − b)`, for λ from a fixed list, which it can only do by luck
while that is true. So that a fault is found whenever it begins, each capital starts again from 1 as it falls below (Shin, Ramdas
and Rinaldo, "E-detectors", 2023). While the mean is within the budget the mean of the capitals reaches `odds` within n samples
with a probability of at most n / odds, whatever the distribution; well within it, hardly ever.
"""

import math
from dataclasses import dataclass, replace

from services.router.domain.divergence import Comparison

__all__ = ["MAX_BUDGET", "Switch", "TagRecord", "is_sampled", "observe"]

# Nats; beyond it nothing of a model's distribution is left to guard.
MAX_BUDGET = 10.0
_UNIT_BUDGET = 1 / 12
# Either way the other mode must be shown to be right, which keeps a tag at its budget from going to and fro. A wrong fallback
# costs time for long; a wrong return is found again within samples.
_FALLBACK_ODDS = 1e6
_RETURN_ODDS = 1e2
# Shares of the largest wager that cannot lose all.
_WAGERS = (0.05, 0.1, 0.2, 0.4, 0.8)
_KEPT = 64
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class TagRecord:
    """What is known of one tag under one model. is_exact: its requests are answered without composing.

    num_samples: since the last switch; recent: the last ones of them, each cut at twelve budgets; capitals: one for each wager.
    """

    is_exact: bool = False
    num_samples: int = 0
    recent: tuple[Comparison, ...] = ()
    capitals: tuple[float, ...] = (1.0,) * len(_WAGERS)

    @property
    def evidence(self) -> float:
        """The odds, by now, that the other mode is right."""
        return sum(self.capitals) / len(self.capitals)

    @property
    def mean_divergence(self) -> float:
        """Of the recent samples, in nats; 0 where there are none."""
        return sum(each.divergence for each in self.recent) / len(self.recent) if self.recent else 0.0

    @property
    def mean_agreement(self) -> float:
        """Of the recent samples; 1 where there are none."""
        return sum(each.agreement for each in self.recent) / len(self.recent) if self.recent else 1.0


@dataclass(frozen=True, slots=True)
class Switch:
    """A tag changes its mode: `before` is the record that says why, `after` the one that goes on."""

    before: TagRecord
    after: TagRecord


def is_sampled(number: int, share: float) -> bool:
    """Whether the request of this number, from 1, is one of the share: evenly spread, in step with no short cycle of traffic."""
    return (number * _GOLDEN) % 1.0 < share


def observe(record: TagRecord, sample: Comparison, budget: float) -> TagRecord | Switch:
    """The record with one more sample, or the switch that it brings; budget: mean nats that may be lost."""
    cut = replace(sample, divergence=min(sample.divergence, budget / _UNIT_BUDGET))
    value = cut.divergence / budget * _UNIT_BUDGET
    noted = replace(
        record,
        num_samples=record.num_samples + 1,
        recent=(*record.recent, cut)[-_KEPT:],
        capitals=tuple(
            max(capital, 1.0) * _growth(value, wager, is_exact=record.is_exact)
            for capital, wager in zip(record.capitals, _WAGERS, strict=True)
        ),
    )
    if noted.evidence < (_RETURN_ODDS if record.is_exact else _FALLBACK_ODDS):
        return noted
    return Switch(noted, TagRecord(is_exact=not record.is_exact))


def _growth(value: float, wager: float, *, is_exact: bool) -> float:
    if is_exact:
        return 1 + wager / (1 - _UNIT_BUDGET) * (_UNIT_BUDGET - value)
    return 1 + wager / _UNIT_BUDGET * (value - _UNIT_BUDGET)
