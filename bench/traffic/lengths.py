"""Numbers of tokens, drawn from a distribution that is given by its quantiles."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Quantiles"]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """points: shares and the tokens that such a share does not exceed, from share 0 to share 1; lines between them.

    Raises:
        ValueError: the points are no distribution of positive numbers.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.points]
        tokens = [own for _, own in self.points]
        if len(self.points) < 2 or shares[0] != 0 or shares[-1] != 1:
            raise ValueError("points must begin at share 0 and end at share 1")
        if any(low >= high for low, high in pairwise(shares)):
            raise ValueError("shares must rise from point to point")
        if tokens[0] < 1 or any(low > high for low, high in pairwise(tokens)):
            raise ValueError("tokens must be at least 1 and must not fall from point to point")

    @classmethod
    def read(cls, value: int | Sequence[tuple[float, float]]) -> "Quantiles":
        """Of one number, or of points as a file writes them.

        Raises:
            ValueError: see above.
        """
        if isinstance(value, int):
            return cls(((0.0, float(value)), (1.0, float(value))))
        return cls(tuple((float(share), float(tokens)) for share, tokens in value))

    @property
    def mean(self) -> float:
        """Of all draws."""
        return sum((end - start) * (low + high) / 2 for (start, low), (end, high) in pairwise(self.points))

    def at(self, share: float) -> int:
        """Tokens that such a share of draws does not exceed."""
        place = min(bisect_right(self.points, (share, float("inf"))), len(self.points) - 1)
        (start, low), (end, high) = self.points[place - 1], self.points[place]
        return max(1, round(low + (high - low) * (share - start) / (end - start)))

    def draw(self, source: random.Random) -> int:
        """One number."""
        return self.at(source.random())

    def scaled(self, factor: float) -> "Quantiles":
        """All numbers times a factor, none below one token."""
        return Quantiles(tuple((share, max(1.0, factor * tokens)) for share, tokens in self.points))
