"""The error tree of the cache service; `adapters/messages.py` maps it once to the errors that cross the wire.

CacheError
├── InvalidOrderError          the caller must change the request
├── UnknownLeaseError          the lease has lapsed or was released
├── UnknownWorkerError         a worker publishes without a live heartbeat
├── StaleEpochsError           an invalidation came between key derivation and plan
├── PinLimitError              all pins together would keep too much
├── DirectoryUnavailableError  the directory's store cannot be reached in time
├── JournalError               the journal of an in-memory directory cannot be used
└── IntegrityError             the directory contradicts itself
"""

from collections.abc import Mapping

__all__ = [
    "CacheError",
    "DirectoryUnavailableError",
    "IntegrityError",
    "InvalidOrderError",
    "JournalError",
    "PinLimitError",
    "StaleEpochsError",
    "UnknownLeaseError",
    "UnknownWorkerError",
]


class CacheError(Exception):
    """An error with a message fit for the caller's eyes."""


class InvalidOrderError(CacheError):
    """The request can never succeed as it is; the message names the field."""


class UnknownLeaseError(CacheError):
    """The lease has lapsed, was released, or never existed."""

    def __init__(self, lease_id: str) -> None:
        super().__init__(f"lease {lease_id!r} is unknown or has lapsed; plan again without lease_id")


class UnknownWorkerError(CacheError):
    """The worker has no live heartbeat, so nobody could fetch from it."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"worker {worker_id!r} has no live heartbeat; send one before publishing")


class StaleEpochsError(CacheError):
    """The keys of the plan were derived with epochs that are no longer current."""

    def __init__(self, current: Mapping[str, int]) -> None:
        super().__init__("the namespace was invalidated while the plan was made; try again")
        self.current = current


class PinLimitError(CacheError):
    """Pins would keep more than their share of the budget."""

    def __init__(self, promised_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"pins would keep {promised_bytes} bytes (a pinned tenant counts with its whole budget) of {limit_bytes};"
            " unpin something, give the tenant a lower max_state_bytes, or raise HYPIC_CACHE_PINNED_SHARE"
        )
        self.promised_bytes = promised_bytes
        self.limit_bytes = limit_bytes


class DirectoryUnavailableError(CacheError):
    """The directory's store cannot be reached in time; parts are to be computed live."""


class JournalError(CacheError):
    """The service cannot start over its journal; the message says why, and what to do."""


class IntegrityError(CacheError):
    """The directory contradicts itself; the message lists every violation."""
