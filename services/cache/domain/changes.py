"""What a directory must not forget in a restart, as a list of changes, and the journal that keeps it.

Entries, leases and tickets are not among them: workers hold what is stored, and tell it with their heartbeats. But
whether a copy that comes back may still be used is known to the directory alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from services.cache.domain.orders import RegisterOrder

__all__ = [
    "Change",
    "Floor",
    "ForgetfulJournal",
    "Invalidated",
    "Journal",
    "Linked",
    "Pinned",
    "Registered",
    "Unpinned",
]


@dataclass(frozen=True, slots=True)
class Invalidated:
    """A scope's last invalidation."""

    scope: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Registered:
    """A document that became the current one of its scope; its record has the version that it was given."""

    order: RegisterOrder


@dataclass(frozen=True, slots=True)
class Linked:
    """A published key that falls with one more scope than its receipts name; `sequence`: since when."""

    key: bytes
    scope: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """Nothing of a scope is evicted."""

    scope: str


@dataclass(frozen=True, slots=True)
class Unpinned:
    """The end of a pin."""

    scope: str


@dataclass(frozen=True, slots=True)
class Floor:
    """Older invalidations and links were forgotten: what was published up to this number does not come back."""

    sequence: int


Change = Invalidated | Registered | Linked | Pinned | Unpinned | Floor


class Journal(ABC):
    """Keeps changes in their order. `life` is random, and another one where changes may have been forgotten."""

    life: str

    @abstractmethod
    def recall(self) -> Iterable[Change]:
        """What was kept, the oldest first. Asked once, before the first write."""

    @abstractmethod
    async def write(self, changes: Sequence[Change], everything: Callable[[], Sequence[Change]]) -> None:
        """Keep changes, and those of earlier calls that failed; they outlive the process once this returns.

        Calls keep their order. `everything` answers what all changes up to now amount to, for a journal that has grown
        long or has lost some.

        Raises:
            DirectoryUnavailableError: they could not be kept, or not for certain.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the medium, behind the last write."""


class ForgetfulJournal(Journal):
    """Keeps nothing: a directory over it takes back nothing that was published in an earlier life."""

    def __init__(self, life: str) -> None:
        self.life = life

    @override
    def recall(self) -> Iterable[Change]:
        return ()

    @override
    async def write(self, changes: Sequence[Change], everything: Callable[[], Sequence[Change]]) -> None:
        pass

    @override
    def close(self) -> None:
        pass
