"""The port of the directory.

Words: a key is *free*, *ticketed* (one live ticket) or *published* (an entry with at least one holder). Time passes
inside the directory: before every call, leases, tickets, workers and entries whose time has run out are removed.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from services.cache.domain.evictions import Eviction
from services.cache.domain.orders import (
    Claim,
    Copy,
    HeartbeatReply,
    PinReply,
    PlanOrder,
    PlanReply,
    PublishOrder,
    PublishReply,
    RegisterOrder,
    RegisterReply,
    Usage,
)
from services.cache.domain.values import DocumentRecord, Removal, StoredState
from services.cache.domain.workers import WorkerRecord

__all__ = ["Directory"]


class Directory(ABC):
    """Entries, leases, tickets, workers, epochs and registered documents.

    Every method is atomic: it happens wholly or not at all, and concurrent calls behave as if made one after another.
    Every method may raise `DirectoryUnavailableError`, within about a second; a change may then have happened or not.
    """

    @abstractmethod
    async def epochs(self, scopes: Sequence[str]) -> Mapping[str, int]:
        """The current epochs of these scopes. Changes nothing."""

    @abstractmethod
    async def plan(self, order: PlanOrder) -> PlanReply:
        """Lease what is published, give tickets for free keys, report what others compute.

        HIT adds the entry to the lease, which counts as one use and raises its score. LIVE leaves the key free: the
        segment was planned less often than `min_uses`, this order counted once. COLD makes a ticket that lives
        `ticket_seconds` or as long as the lease, whichever is longer; a key that this lease owns already keeps its
        ticket. PENDING leaves the ticket with its owner. In these cases documents and their tags are added to what
        the key falls with. SUPERSEDED changes nothing. A key that is not published where its public key is becomes a
        HIT with the public key; nothing of the tenant is added to that. Repeating an order is harmless.

        Raises:
            StaleEpochsError: the keys were derived with epochs that are not current; nothing changed.
            UnknownLeaseError: `extends` names no live lease; nothing changed.
        """

    @abstractmethod
    async def renew(self, lease_id: str, lease_seconds: float) -> None:
        """Prolong a lease, and its tickets where they would end sooner; never shortens.

        Raises:
            UnknownLeaseError: the lease has lapsed or was released.
        """

    @abstractmethod
    async def release(self, *lease_ids: str) -> None:
        """End leases and free their unpublished tickets. An unknown lease is no error."""

    @abstractmethod
    async def publish(self, order: PublishOrder) -> PublishReply:
        """Turn a ticket into an entry, evicting unleased and unpinned ones to keep the budgets.

        What exceeds the tenant's budget evicts entries of this tenant only; `domain/eviction.py` says in which order.

        The lease that owned the ticket, where it still lives, protects the new entry. Publishing again under the
        same ticket is ACCEPTED, and adds the worker as another holder of the same bytes. Evicted copies are marked:
        each holder gets its keys to drop with its next heartbeat.
        FENCED and INVALIDATED change nothing; OVER_BUDGET ends the ticket and evicts nothing.

        Raises:
            UnknownWorkerError: the worker has no live heartbeat; the ticket stays.
        """

    @abstractmethod
    async def invalidate(self, scope: str) -> Removal:
        """Make everything of a scope unreachable for every later plan, leased or not.

        Advances the scope's epoch; its tickets die (publish answers INVALIDATED), its copies are marked for dropping.
        A document's scope takes its registration along, a tag's or tenant's all of theirs; a model's takes none.
        """

    @abstractmethod
    async def pin(self, scope: str, budget_bytes: int = 0) -> PinReply:
        """Evict no segment that falls with a scope of a document or tenant, now or when it is stored later.

        Pins promise the budgets of their tenants, and what is stored of other documents when one is added.
        `budget_bytes` replaces the budget of a tenant's scope unless it is 0, as in `PlanOrder`. Invalidating the scope
        ends the pin; registering another text does not.

        Raises:
            PinLimitError: all pins together would promise more than `Limits.pin_limit_bytes`; nothing changed.
        """

    @abstractmethod
    async def unpin(self, scope: str) -> PinReply:
        """Take a pin back, where there is one."""

    @abstractmethod
    async def pinned(self, scopes: Sequence[str]) -> frozenset[str]:
        """Those of the scopes that are pinned. Changes nothing."""

    @abstractmethod
    async def register(self, order: RegisterOrder) -> RegisterReply:
        """Make a document the current one of its scope.

        The same title, text and tags again are UNCHANGED. Otherwise the scope is invalidated first: what was stored
        or is being computed under it falls, and plans with another digest are SUPERSEDED from now on.
        """

    @abstractmethod
    async def find_document(self, scope: str) -> DocumentRecord | None:
        """The registered document of a scope. Changes nothing."""

    @abstractmethod
    async def list_documents(self, tenant: str, after: str, limit: int) -> tuple[DocumentRecord, ...]:
        """Registered documents of a tenant's scope by id (as UTF-8 bytes), the first `limit` behind `after`."""

    @abstractmethod
    async def states(self, scope: str) -> tuple[StoredState, ...]:
        """Published entries that fall with a scope, in key order. Changes nothing but what time has ended."""

    @abstractmethod
    async def reconcile(self) -> int:
        """Evict until every budget is kept; the number of entries evicted.

        `publish` keeps the budgets by itself; they are exceeded where they were lowered while copies were held.
        Leased and pinned entries stay.
        """

    @abstractmethod
    async def heartbeat(self, worker: WorkerRecord, copies: Sequence[Copy]) -> HeartbeatReply:
        """Note that a worker lives, what it says of itself and what it holds.

        A worker lists each copy whose publish was accepted, and none that is stored but not yet published: what it
        does not list is never in the reply, so a state between store and publish cannot be dropped by it.
        A listed copy that is marked comes back to be dropped. A known copy that is not listed loses this holder,
        unless it was published less than `settle_seconds` ago (the list may be older than the publish).
        """

    @abstractmethod
    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """Living workers by id, as their last heartbeats described them. Changes nothing but what time has ended."""

    @abstractmethod
    async def restore(self, worker_id: str, claims: Sequence[Claim]) -> tuple[bytes, ...]:
        """Take back entries from opened receipts; the keys that were refused, which the worker is to drop.

        A record with a newer epoch than the directory knows advances that epoch (the directory lost its memory).
        Refused: an older epoch, a document invalidated since, an age beyond `entry_ttl_seconds`,
        a key published with other bytes, no room without
        evicting, a worker without heartbeat. A live ticket for a restored key ends; its publish is FENCED.
        """

    @abstractmethod
    async def evictions(self) -> tuple[Eviction, ...]:
        """Whose entries made room for whose, for publishes: the pairs of tenants with most, most first. Changes nothing."""

    @abstractmethod
    async def usage(self) -> Usage:
        """Counts for gauges. Changes nothing but what time has ended."""

    @abstractmethod
    async def check_integrity(self) -> None:
        """Verify that all indexes agree with each other. For tests and debugging; not atomic, reads everything.

        Raises:
            IntegrityError: they do not.
        """

    @abstractmethod
    async def close(self) -> None:
        """Give up connections. The directory is unusable afterwards."""
