"""What a pass costs on this machine, and what that says of a setting."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["CostCurve", "Pass", "fit_curve"]


@dataclass(frozen=True, slots=True)
class Pass:
    """One timed pass of one prompt."""

    live_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CostCurve:
    """`pass_seconds + token_seconds × live tokens`. worst_error: the largest relative distance of a point from the line."""

    pass_seconds: float
    token_seconds: float
    points: int
    worst_error: float

    def seconds(self, live_tokens: float) -> float:
        """Of one pass."""
        return self.pass_seconds + self.token_seconds * live_tokens


def fit_curve(passes: Sequence[Pass]) -> CostCurve:
    """The line through the fastest pass of every number of live tokens, by least relative squares; neither part is negative.

    What else runs on a machine only ever adds to a pass, so that the fastest of several says most of the pass itself.

    Raises:
        ValueError: fewer than two numbers of live tokens.
    """
    fastest: dict[int, float] = {}
    for own in passes:
        fastest[own.live_tokens] = min(own.seconds, fastest.get(own.live_tokens, own.seconds))
    if len(fastest) < 2:
        raise ValueError("a cost curve needs passes of two numbers of live tokens")
    tokens, seconds = (np.array(values, dtype=np.float64) for values in (list(fastest), list(fastest.values())))
    slope, offset = np.polyfit(tokens, seconds, 1, w=1 / seconds)
    if offset < 0:
        slope, offset = np.average(seconds / tokens), 0.0
    elif slope < 0:
        slope, offset = 0.0, seconds.mean()
    errors = np.abs(offset + slope * tokens - seconds) / seconds
    return CostCurve(float(offset), float(slope), len(fastest), float(errors.max()))
