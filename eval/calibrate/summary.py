"""From outcomes to what was measured of each setting, with intervals that know of the prompts not asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log

import numpy as np
from numpy.typing import NDArray

from eval.calibrate.candidates import without_refresh
from eval.calibrate.choice import Measured
from eval.calibrate.cost import CostCurve
from eval.pack import NumberedPrompt
from eval.scoring import Outcome
from eval.settings import Mode, Setting
from eval.statistics import Interval, mean_interval

__all__ = ["CostModel", "guarded_interval", "least_prompts", "summarise", "upper_bound", "whole_prompts"]

_TAIL = 0.025
_DRAWS = 4_000
# Finer than this, in nats, fp32 tells no distributions apart.
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class CostModel:
    """curve: None where none was measured; look_share: of a pass, taken ahead of a refresh to see what is attended to."""

    curve: CostCurve | None
    look_share: float

    def seconds(self, live: float, live_before: float | None) -> float | None:
        """To the first token of a prompt with so many live tokens, before its blocks were refreshed so many."""
        if self.curve is None:
            return None
        looking = 0.0 if live_before is None else self.look_share * self.curve.seconds(live_before)
        return self.curve.seconds(live) + looking


def whole_prompts(outcomes: Sequence[Outcome], settings: Sequence[Setting]) -> set[int]:
    """Those that were asked under every setting."""
    names = {str(Mode.OFF), *(own.name for own in settings)}
    asked: dict[int, set[str]] = {}
    for own in outcomes:
        asked.setdefault(own.question, set()).add(own.setting)
    return {number for number, own in asked.items() if names <= own}


def summarise(
    outcomes: Sequence[Outcome],
    prompts: Sequence[NumberedPrompt],
    settings: Sequence[Setting],
    cost: CostModel,
    cut: float,
) -> list[Measured]:
    """Every setting on the prompts asked under all of them, in the order of `settings`; cut: see `guarded_interval`."""
    asked = sorted(whole_prompts(outcomes, settings))
    around = [len(own.prompt.token_ids) - own.prompt.document_tokens for own in prompts if own.number in asked]
    found: dict[str, list[Outcome]] = {own.name: [] for own in settings}
    for own in sorted(outcomes, key=lambda each: each.question):
        if own.question in asked and own.setting in found:
            found[own.setting].append(own)

    def live(setting: Setting) -> float:
        return float(np.mean(around) + np.mean([own.live_tokens for own in found[setting.name]]))

    def seconds(setting: Setting) -> float | None:
        return cost.seconds(live(setting), None if setting.refresh is None else live(without_refresh(setting)))

    return [_measured(own, found[own.name], seconds(own) if cost.curve is not None else None, cut) for own in settings]


def _measured(setting: Setting, outcomes: Sequence[Outcome], seconds: float | None, cut: float) -> Measured:
    scores = [own.scores for own in outcomes]
    differing = guarded_interval([float(not own.agrees) for own in scores], 1.0)
    return Measured(
        setting,
        live_share=float(np.mean([own.live_tokens / own.document_tokens for own in outcomes])),
        kl=guarded_interval([own.divergence for own in scores], cut),
        first_kl=guarded_interval([own.first_divergence for own in scores], cut),
        agreement=Interval(1.0 - differing.value, 1.0 - differing.high, 1.0 - differing.low),
        seconds=seconds,
        prompts=len(outcomes),
    )


def guarded_interval(values: Sequence[float], cut: float) -> Interval:
    """The mean of values of at least 0 with the interval of a bootstrap, whose upper end is no lower than `upper_bound`.

    A bootstrap knows the prompts asked alone: where none of them went astray it says that none ever does.
    """
    found = np.maximum(np.array(values, dtype=np.float64), 0.0)
    interval = mean_interval(found, seed=0)
    high = max(interval.high, upper_bound(found, cut))
    return Interval(*(round(own, _DIGITS) for own in (interval.value, interval.low, high)))


def upper_bound(values: NDArray[np.float64], cut: float) -> float:
    """Below it lies the mean of `min(value, cut)`, in 97.5 % of samples: weights drawn evenly over the values and the cut.

    Gaffke, Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative variable, 2005. With
    n zeros it is `cut × (1 − 0.025^(1/n))`, the exact bound of n trials without an event.
    """
    points = np.append(np.minimum(values, cut), cut)
    weights = np.random.default_rng(0).dirichlet(np.ones(len(points)), _DRAWS)
    return float(np.quantile(weights @ points, 1.0 - _TAIL))


def least_prompts(nats: float, cut: float) -> int:
    """How many prompts, none of which diverges at all, can show that the mean lies below so many nats."""
    return ceil(log(_TAIL) / log(1.0 - nats / cut))
