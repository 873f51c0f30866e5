"""A directory under test behind the real `SegmentCache`, with a clock that only the test moves."""

import asyncio
import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import redis

from services.cache.adapters.journal import JournalFile
from services.cache.adapters.memory import MemoryDirectory
from services.cache.adapters.redis_directory import RedisAddress, RedisDirectory
from services.cache.domain.cache import (
    CopyOrder,
    NamedDocument,
    PartEntry,
    PlanRequest,
    PublishResult,
    ResidentCopy,
    SegmentCache,
)
from services.cache.domain.changes import ForgetfulJournal
from services.cache.domain.directory import Directory
from services.cache.domain.documents import DocumentRegistry
from services.cache.domain.orders import PlannedEntry, PlanReply, PublishOrder, RegisterReply
from services.cache.domain.pins import Pins
from services.cache.domain.values import DocumentRecord, EntryKind, Limits, Namespace, PlanOutcome, PublishOutcome
from services.cache.domain.workers import WorkerRecord

__all__ = ["LIMITS", "SECRET", "Clock", "Rig", "create_rig", "digest", "gather_plans", "journaled_rig", "rig_over"]

SECRET = b"a secret of the tests"
LIMITS = Limits(budget_bytes=1000, ticket_seconds=60.0, worker_ttl_seconds=15.0, settle_seconds=5.0, pinned_share=1.0)


@dataclass(slots=True)
class Clock:
    """Seconds since the Unix epoch, as the test wants them."""

    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def digest(content: str) -> bytes:
    """What stands for the text of a content."""
    return sha256(content.encode()).digest()


def _named(document_id: str, content: str) -> tuple[NamedDocument, ...]:
    return (NamedDocument(document_id, digest(content)),) if document_id else ()


@dataclass(slots=True)
class Rig:
    """Shorthand for the calls of router and worker."""

    kind: str
    clock: Clock
    directory: Directory
    cache: SegmentCache
    documents: DocumentRegistry
    pins: Pins
    redis_url: str = ""
    receipts: dict[tuple[str, bytes], bytes] = field(default_factory=dict)

    async def plan(
        self,
        *contents: str,
        tenant: str = "acme",
        salt: str = "",
        model: str = "model-1",
        lease_id: str = "",
        document: str | None = None,
        seconds: float = 30.0,
        kind: EntryKind = EntryKind.SEGMENT,
        admit_all: bool = False,
    ) -> PlanReply:
        """Plan parts; each content is its own document unless one is named, or none with an empty name."""
        entries = tuple(
            PartEntry(kind, digest(one), 100, _named(f"doc-{one}" if document is None else document, one))
            for one in contents
        )
        return await self.cache.plan(
            PlanRequest(Namespace(tenant, salt), model, "profile-1", entries, seconds, lease_id, admit_all)
        )

    async def outcomes(self, *contents: str, tenant: str = "acme", salt: str = "") -> list[PlanOutcome]:
        """How the parts stand for a newcomer, who leaves no trace of leases or tickets."""
        reply = await self.plan(*contents, tenant=tenant, salt=salt)
        await self.cache.release(reply.lease_id)
        return [entry.outcome for entry in reply.entries]

    async def publish(self, planned: PlannedEntry, worker: str = "w1", size: int = 100) -> PublishResult:
        """Publish what a COLD entry's ticket allows, keeping the receipt."""
        assert planned.ticket is not None
        order = PublishOrder(planned.key, planned.ticket.ticket_id, planned.ticket.fence, worker, "host", size)
        result = await self.cache.publish(order)
        if result.outcome is PublishOutcome.ACCEPTED:
            self.receipts[worker, planned.key] = result.receipt
        return result

    async def store(self, *contents: str, worker: str = "w1", size: int = 100, tenant: str = "acme") -> list[bytes]:
        """Plan, publish and release parts that are cold; their keys."""
        reply = await self.plan(*contents, tenant=tenant)
        for planned in reply.entries:
            result = await self.publish(planned, worker, size)
            assert result.outcome is PublishOutcome.ACCEPTED
        await self.cache.release(reply.lease_id)
        return [planned.key for planned in reply.entries]

    async def register(
        self, document_id: str, content: str, *tags: str, tenant: str = "acme", title: str = ""
    ) -> RegisterReply:
        """Make a content the current one of a document."""
        record = DocumentRecord(document_id, title, tags, digest(content), 100)
        return await self.documents.register(tenant, record)

    async def invalidate_document(self, tenant: str, document_id: str) -> int:
        """The number of entries removed."""
        return (await self.cache.invalidate_document(tenant, document_id)).num_entries

    async def invalidate_tag(self, tenant: str, tag: str) -> int:
        """The number of entries removed."""
        return (await self.cache.invalidate_tag(tenant, tag)).num_entries

    async def invalidate_tenant(self, tenant: str) -> int:
        """The number of entries removed."""
        return (await self.cache.invalidate_tenant(tenant)).num_entries

    async def invalidate_model(self, model: str) -> int:
        """The number of entries removed."""
        return (await self.cache.invalidate_model(model)).num_entries

    async def beat(self, worker: str = "w1", keys: list[bytes] | None = None) -> set[bytes]:
        """A heartbeat that lists these keys with the receipts kept for them; the keys to drop."""
        resident = [ResidentCopy(key, "host", self.receipts.get((worker, key), b"")) for key in keys or []]
        return set(await self.cache.heartbeat(WorkerRecord(worker, f"{worker}.test:7201"), resident))

    async def copy(self, key: bytes, holder: str, worker: str, receipt: bytes | None = None) -> PublishResult:
        """Publish a copy that a worker has from a holder, whose receipt it shows unless another one is given."""
        shown = self.receipts[holder, key] if receipt is None else receipt
        result = await self.cache.publish_copy(CopyOrder(key, worker, "host", holder, shown))
        if result.outcome is PublishOutcome.ACCEPTED:
            self.receipts[worker, key] = result.receipt
        return result


def create_rig(
    kind: str,
    redis_url: str,
    limits: Limits = LIMITS,
    clock: Clock | None = None,
    life: str = "one life",
    timeout_seconds: float = 30.0,
) -> Rig:
    """A rig over a directory that holds nothing; with the same `life` it takes back what another one has published.

    timeout_seconds: of Redis; long, since a machine that is busy with other tests is no server that has gone.
    """
    clock = clock or Clock()
    directory: Directory
    if kind == "memory":
        directory = MemoryDirectory(limits, clock, ForgetfulJournal(life))
    else:
        prefix = f"test-{secrets.token_hex(6)}"
        with redis.Redis.from_url(redis_url) as client:
            client.set(f"{{{prefix}}}:life", life)
        address = RedisAddress(redis_url, prefix, timeout_seconds=timeout_seconds)
        directory = RedisDirectory(address, limits, clock)
    return rig_over(directory, kind, clock, redis_url)


def journaled_rig(path: Path, limits: Limits = LIMITS, clock: Clock | None = None) -> Rig:
    """A rig over an in-memory directory that remembers what this file holds."""
    clock = clock or Clock()
    return rig_over(MemoryDirectory(limits, clock, JournalFile(path, SECRET)), "memory", clock)


def rig_over(directory: Directory, kind: str, clock: Clock, redis_url: str = "") -> Rig:
    """A rig over this directory."""
    cache, documents = SegmentCache(directory, SECRET), DocumentRegistry(directory, SECRET)
    return Rig(kind, clock, directory, cache, documents, Pins(directory, SECRET), redis_url)


async def gather_plans(rig: Rig, count: int, *contents: str) -> list[PlanReply]:
    """Concurrent plans for the same parts."""
    return list(await asyncio.gather(*(rig.plan(*contents) for _ in range(count))))
