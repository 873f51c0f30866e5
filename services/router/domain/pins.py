"""Pins: which documents' states are never evicted."""

from dataclasses import dataclass
from typing import Protocol

from services.router.domain.errors import RouterError
from services.router.domain.request import Namespace

__all__ = ["PinDirectory", "PinInfo", "PinRefusedError"]


class PinRefusedError(RouterError):
    """All pins together would keep more than they may; the message says how much, and what to do."""


@dataclass(frozen=True, slots=True)
class PinInfo:
    """Published entries of what was named; what all pins may keep now, and the most that they may."""

    num_entries: int
    promised_bytes: int
    limit_bytes: int


class PinDirectory(Protocol):
    """The cache service's calls about pins. Every method raises a `HypicError` when it cannot answer in time."""

    async def pin(self, namespace: Namespace, document_id: str) -> PinInfo:
        """Evict no segment state of a document, or of the whole tenant where the id is empty.

        Raises:
            ConflictError: pins would keep more than they may.
        """
        ...

    async def unpin(self, namespace: Namespace, document_id: str) -> PinInfo:
        """Take a pin back, where there is one."""
        ...
