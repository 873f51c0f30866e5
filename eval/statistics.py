"""Means by setting and question type, and paired bootstrap intervals against full recompute."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.scoring import Outcome
from eval.settings import Mode

__all__ = ["Interval", "Summary", "mean_interval", "paired_loss", "summarise"]

_RESAMPLES = 2000
_Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One setting on one group of questions; shares are of 1, loss is in points of exact match against full recompute.

    divergence: nats an answer token. live_share: live document tokens over document tokens, the mean over questions, as
    that of run_share (`Outcome`).
    reference: exact match of full recompute on the same questions.
    """

    setting: str
    group: str
    questions: int
    exact: float
    f1: float
    agreement: float
    divergence: float
    live_share: float
    run_share: float
    reference: float
    loss: Interval


def summarise(outcomes: Sequence[Outcome], groups: Mapping[str, Collection[int]], seed: int = 0) -> list[Summary]:
    """Every setting, in order of first appearance, on the questions of each group that it was asked."""
    by_setting: dict[str, dict[int, Outcome]] = {}
    for outcome in outcomes:
        by_setting.setdefault(outcome.setting, {})[outcome.question] = outcome
    reference = by_setting[str(Mode.OFF)]
    return [
        _summary(setting, group, [own[number] for number in numbers], [reference[number] for number in numbers], seed)
        for setting, own in by_setting.items()
        for group, members in groups.items()
        if (numbers := sorted(number for number in own if number in members))
    ]


def _summary(setting: str, group: str, found: Sequence[Outcome], expected: Sequence[Outcome], seed: int) -> Summary:
    exact = np.array([own.scores.exact for own in found], dtype=np.float64)
    reference = np.array([own.scores.exact for own in expected], dtype=np.float64)
    return Summary(
        setting=setting,
        group=group,
        questions=len(found),
        exact=float(exact.mean()),
        f1=float(np.mean([own.scores.f1 for own in found])),
        agreement=float(np.mean([own.scores.agrees for own in found])),
        divergence=float(np.mean([own.scores.divergence for own in found])),
        live_share=float(np.mean([own.live_tokens / own.document_tokens for own in found])),
        run_share=float(np.mean([own.run_share for own in found])),
        reference=float(reference.mean()),
        loss=paired_loss(reference, exact, seed),
    )


def paired_loss(expected: _Numbers, found: _Numbers, seed: int) -> Interval:
    """Points lost, with the percentile interval of a bootstrap over questions."""
    return mean_interval(100.0 * (expected - found), seed)


def mean_interval(values: _Numbers, seed: int) -> Interval:
    """The mean over questions, with the percentile interval of a bootstrap over them."""
    draws = np.random.default_rng(seed).multinomial(len(values), np.full(len(values), 1 / len(values)), _RESAMPLES)
    means = draws @ values / len(values)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(values.mean()), float(low), float(high))
