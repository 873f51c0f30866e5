"""A model split over ranks: which of its heads and channels one of them holds, and how their partial results are added up."""

from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.errors import WorkerError

__all__ = ["WHOLE", "Ranks", "Share", "SplitError"]


class SplitError(WorkerError):
    """The model cannot be split over so many ranks; the message names what, and the numbers."""


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` equal shares of a model's heads and channels, each contiguous and in order."""

    index: int = 0
    count: int = 1

    def of(self, number: int, what: str) -> int:
        """How many of `number` heads or channels a share has.

        Raises:
            SplitError: shares would not be equal.
        """
        if number % self.count:
            raise SplitError(
                f"config.json: {number} {what} cannot be split over {self.count} ranks; set"
                f" HYPIC_WORKER_TENSOR_PARALLEL to {f'a divisor of {number}' if number > 1 else '1'}"
            )
        return number // self.count

    def among(self, number: int, what: str) -> "Share":
        """The share of `number` heads that serve all ranks: where they are fewer than ranks, several hold the same one.

        Raises:
            SplitError: shares would not be equal, or not as many ranks would hold every head.
        """
        if number < self.count and self.count % number == 0:
            return Share(self.index // (self.count // number), number)
        self.of(number, what)
        return self


WHOLE = Share()


class Ranks(Protocol):
    """The ranks that hold a model together, as one of them sees them."""

    @property
    def share(self) -> Share:
        """What this rank holds."""
        ...

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, of the same bits on every rank; may use the memory of `partial`.

        Every rank calls it as often and in the same order, with tensors of one shape.
        """
        ...
