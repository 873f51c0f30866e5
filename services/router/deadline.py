"""The time that a request may take, handed from hop to hop."""

import time
from dataclasses import dataclass
from typing import Self

from services.common.errors import DeadlineError

__all__ = ["Deadline"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on the monotonic clock, in seconds."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """The deadline this many seconds from now."""
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Seconds left.

        Raises:
            DeadlineError: none are left.
        """
        seconds = self.at - time.monotonic()
        if seconds <= 0:
            raise DeadlineError("the request took longer than the time allowed")
        return seconds
