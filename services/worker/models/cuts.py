"""What a rank takes of a tensor whose whole the config describes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.mixers.share import Share

__all__ = ["Cut", "Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run of heads or channels along an axis: its whole length, and the share that is taken of it."""

    length: int
    share: Share


@dataclass(frozen=True, slots=True)
class Cut:
    """Shares of runs along one axis, one behind the other.

    A fused tensor has several runs: queries, keys and values, or gates and ups.
    """

    runs: tuple[Run, ...]
    axis: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int], share: Share, axis: int = 0) -> "Cut":
        """The same share of each of several runs."""
        return cls(tuple(Run(length, share) for length in lengths), axis)

    def __add__(self, behind: "Cut") -> "Cut":
        """These runs, then those of another cut along the same axis."""
        return Cut(self.runs + behind.runs, self.axis)

    @property
    def length(self) -> int:
        """Of the whole axis."""
        return sum(run.length for run in self.runs)

    @property
    def is_whole(self) -> bool:
        """Nothing is left out."""
        return all(run.share.count == 1 for run in self.runs)

    @property
    def ranges(self) -> Sequence[slice]:
        """Along the axis.

        Raises:
            SplitError: a run has no equal shares.
        """
        ranges, start = [], 0
        for run in self.runs:
            own = run.share.of(run.length, "channels")
            first = start + run.share.index * own
            ranges.append(slice(first, first + own))
            start += run.length
        return ranges

    def index(self, taken: slice) -> tuple[slice, ...]:
        """One of `ranges` as an index of the tensor."""
        return (*[slice(None)] * self.axis, taken)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Of what is taken."""
        taken = sum(own.stop - own.start for own in self.ranges)
        return (*whole[: self.axis], taken, *whole[self.axis + 1 :])

    def apply(self, whole: torch.Tensor) -> torch.Tensor:
        """What is taken, in memory of its own, so that the whole can be given back."""
        return torch.cat([whole[self.index(taken)] for taken in self.ranges], dim=self.axis)
