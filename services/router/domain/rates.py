"""How much a tenant may ask for in a minute: token buckets as plain values.

A bucket holds a minute's worth at most and fills evenly. In any span of t seconds no more than a minute's worth plus what t
seconds bring is let in.
"""

from dataclasses import dataclass

from services.router.domain.errors import RouterError

__all__ = ["NO_RATES", "Bucket", "Rates", "TooBusyError", "refill", "seconds_until", "spend"]

_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Bounds of a tenant at each router; 0 is none. Tokens are those of prompts and replies together."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0


NO_RATES = Rates()


class TooBusyError(RouterError):
    """Too much has been asked for; the same request may succeed in `retry_after_seconds`. `code`: whose bound it was."""

    def __init__(self, message: str, retry_after_seconds: float, code: str) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.code = code


@dataclass(frozen=True, slots=True)
class Bucket:
    """`level` is what may be taken at the time `at`, in seconds of any steady clock; below 0 where too much was spent."""

    level: float
    at: float


def refill(bucket: Bucket | None, per_minute: int, now: float) -> Bucket:
    """The bucket as it is now; a full one where there was none, and no fuller one where the bound was lowered."""
    if bucket is None:
        return Bucket(float(per_minute), now)
    return Bucket(min(float(per_minute), bucket.level + max(0.0, now - bucket.at) * per_minute / _MINUTE), now)


def seconds_until(bucket: Bucket, per_minute: int, amount: float) -> float:
    """How long until the bucket holds this amount; 0 where it does. More than a minute's worth is let in once it is full."""
    return max(0.0, (min(amount, per_minute) - bucket.level) * _MINUTE / per_minute)


def spend(bucket: Bucket, amount: float) -> Bucket:
    """The bucket after this amount was taken, which may be more than it held: what a reply takes is known at its end."""
    return Bucket(bucket.level - amount, bucket.at)
