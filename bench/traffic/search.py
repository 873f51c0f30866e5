"""Which rate to try next: the highest that keeps each of several promises, by bisection over shared levels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.traffic.levels import Level, holds

__all__ = ["Bracket", "RateSearch"]

_CLOSE = 1.12
_GROWTH = 1.8
_LEAST_RATE = 0.01
# Requests that run at a time on average, up to which one seldom meets another.
_ALONE = 0.3


@dataclass(frozen=True, slots=True)
class Bracket:
    """Requests a second. held: the highest rate below every failure that kept the promise, 0 where none has; failed: the least
    rate above it that did not, None where none was tried; out_of_reach: requests that hardly met others have failed, so that
    no lower rate would do.
    """

    promise: float
    held: float
    failed: float | None
    out_of_reach: bool = False

    @property
    def is_closed(self) -> bool:
        """No rate worth trying is left between the two, or below."""
        if self.failed is None:
            return False
        return self.out_of_reach or self.failed <= _LEAST_RATE or (self.held > 0 and self.failed <= _CLOSE * self.held)


@dataclass(slots=True)
class RateSearch:
    """promises: seconds to the first token; start: the first rate to try.

    A rate that has failed by the tail alone (half of the first tokens came within a third of the promise) is measured once
    more, and the second level counts: what a server does once, as compiling, is no rate's fault.
    """

    promises: Sequence[float]
    start: float
    levels: list[Level] = field(default_factory=list)

    def add(self, level: Level) -> None:
        """A level was measured. One whose sender was late says nothing of the server, and ends the search above it."""
        self.levels.append(level)

    def bracket(self, promise: float) -> Bracket:
        """What is known of one promise."""
        last = {own.rate: own for own in self.levels}.values()
        failures = [own for own in last if not holds(own, promise)]
        failed = min((own.rate for own in failures), default=math.inf)
        held = max((own.rate for own in last if holds(own, promise) and own.rate < failed), default=0.0)
        alone = any(own.metrics.get("running", math.inf) <= _ALONE and not own.behind for own in failures)
        return Bracket(promise, held, None if math.isinf(failed) else failed, alone and not held)

    @property
    def brackets(self) -> list[Bracket]:
        """Of all promises."""
        return [self.bracket(promise) for promise in self.promises]

    def next_rate(self) -> float | None:
        """The rate that halves the widest bracket; None where all are closed."""
        if not self.levels:
            return self.start
        if self._is_doubtful():
            return self.levels[-1].rate
        open_ones = [own for own in self.brackets if not own.is_closed]
        if not open_ones:
            return None
        return _between(max(open_ones, key=_width))

    def _is_doubtful(self) -> bool:
        """The last level failed by its tail, at a rate that was measured once."""
        last = self.levels[-1]
        if sum(own.rate == last.rate for own in self.levels) > 1:
            return False
        tried = (own.promise for own in self.brackets if own.failed == last.rate)
        return any(last.first_token_p50 <= promise / 3 and not last.behind for promise in tried)


def _width(bracket: Bracket) -> float:
    """Unknown ends come first."""
    if bracket.failed is None or not bracket.held:
        return math.inf
    return bracket.failed / bracket.held


def _between(bracket: Bracket) -> float:
    if bracket.failed is None:
        return bracket.held * _GROWTH
    if not bracket.held:
        return bracket.failed / _GROWTH**2
    return math.sqrt(bracket.held * bracket.failed)
