"""How many tokens at the head of a segment are recomputed at every use."""

from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

__all__ = ["MAX_SEAM_WINDOW", "SeamWindow"]

MAX_SEAM_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class SeamWindow:
    """`w(L) = min(max(least, ceil(share · L)), most)` tokens of a segment of `L`; with share 0, `least` whatever its length.

    A share of at most 1 keeps the body `L − w(L)` from shrinking as segments grow: one token more adds at most one to
    `share · L`, hence at most one to its ceiling, and `max` and `min` with constants pass on no larger step.
    """

    least: int
    share: float = 0.0
    most: int = MAX_SEAM_WINDOW

    def tokens(self, length: int) -> int:
        """The window of a segment of `length` tokens; longer than the segment where that is shorter than `least`."""
        # The share is the decimal number that the profile says: 0.07 of 100 tokens is 7, where floats would give 8.
        return min(max(self.least, ceil(Fraction(repr(self.share)) * length)), self.most)

    def least_segment(self, least_body: int) -> int:
        """The least length whose body has `least_body` tokens; every longer segment has as many."""
        lengths = range(self.most + least_body + 1)
        return bisect_left(lengths, least_body, key=lambda length: length - self.tokens(length))
