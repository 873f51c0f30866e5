"""What the cache service does for its callers, over any directory."""

import math
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.cache.domain.directory import Directory
from services.cache.domain.errors import InvalidOrderError, StaleEpochsError
from services.cache.domain.evictions import Eviction
from services.cache.domain.keys import DocumentScopes, EntryKeys, KeyDeriver, KeyOwner
from services.cache.domain.orders import Claim, Copy, DocumentRef, PlanOrder, PlanReply, PublishOrder, Wanted
from services.cache.domain.receipts import ReceiptSigner
from services.cache.domain.tenant_names import TenantNames
from services.cache.domain.values import (
    DIGEST_BYTES,
    KEY_BYTES,
    PUBLIC_TENANT,
    EntryKind,
    Epochs,
    Namespace,
    PublishOutcome,
    Removal,
)
from services.cache.domain.workers import WorkerRecord

__all__ = ["CopyOrder", "NamedDocument", "PartEntry", "PlanRequest", "PublishResult", "ResidentCopy", "SegmentCache"]

_PLAN_ATTEMPTS = 5
_REMEMBERED_EPOCHS = 10_000
_MAX_LEASE_SECONDS = 3600.0
_PUBLIC = Namespace(PUBLIC_TENANT, "")


@dataclass(frozen=True, slots=True)
class NamedDocument:
    """A document by its tenant's id, and the digest of its title and text."""

    document_id: str
    digest: bytes


class PartEntry(NamedTuple):
    """A reusable part as the router knows it, with every document with an id whose text stands in it."""

    kind: EntryKind
    content_hash: bytes
    num_tokens: int
    documents: tuple[NamedDocument, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """All reusable parts of one request. `lease_seconds` 0 means the default; `lease_id` extends an earlier plan.

    `admit_all`: give a ticket for every absent part, however seldom it was seen.
    """

    namespace: Namespace
    model: str
    profile_digest: str
    entries: tuple[PartEntry, ...]
    lease_seconds: float
    lease_id: str
    admit_all: bool = False


@dataclass(frozen=True, slots=True)
class PublishResult:
    """`receipt` comes with ACCEPTED; the worker hands it back in its heartbeats."""

    outcome: PublishOutcome
    drop_keys: tuple[bytes, ...]
    receipt: bytes


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """A worker's claim that it holds the bytes of a key as another holder gave them, with that holder's receipt."""

    key: bytes
    worker_id: str
    tier: str
    holder_id: str
    holder_receipt: bytes


@dataclass(frozen=True, slots=True)
class ResidentCopy:
    """A published copy as its worker lists it."""

    key: bytes
    tier: str
    receipt: bytes


class SegmentCache:
    """Derives keys, checks requests, signs and opens receipts; the directory decides everything else."""

    def __init__(self, directory: Directory, secret: bytes, default_lease_seconds: float = 30.0) -> None:
        self._directory = directory
        self._keys = KeyDeriver(secret)
        self._receipts = ReceiptSigner(secret)
        self._epochs: OrderedDict[tuple[str, ...], Mapping[str, int]] = OrderedDict()
        self._tenants = TenantNames()
        self._default_lease_seconds = default_lease_seconds

    async def plan(self, request: PlanRequest) -> PlanReply:
        """Plan every part at once, under keys of the current epochs.

        Raises:
            InvalidOrderError: a field is malformed; the message names it.
            UnknownLeaseError: `lease_id` names no live lease.
            StaleEpochsError: the namespace is being invalidated faster than plans can be made.
        """
        _check_plan(request)
        scopes = self._plan_scopes(request)
        self._tenants.remember(scopes[0], request.namespace.tenant)
        epochs = self._epochs.get(scopes) or await self._directory.epochs(scopes)
        lease_id, nonce = request.lease_id or secrets.token_hex(16), secrets.token_hex(8)
        for _ in range(_PLAN_ATTEMPTS):
            order = PlanOrder(
                lease_id=lease_id,
                extends=bool(request.lease_id),
                nonce=nonce,
                lease_seconds=self._lease_seconds(request.lease_seconds),
                tenant=scopes[0],
                model=scopes[1],
                epochs=epochs,
                wanted=self._wanted(request, [epochs[scope] for scope in scopes]),
                budget_bytes=request.namespace.budget_bytes,
                admit_all=request.admit_all,
            )
            try:
                reply = await self._directory.plan(order)
            except StaleEpochsError as error:
                epochs = error.current
            else:
                self._remember(scopes, epochs)
                return reply
        raise StaleEpochsError(epochs)

    def _remember(self, scopes: tuple[str, ...], epochs: Mapping[str, int]) -> None:
        """Most plans find the epochs of the last one, which spares them a call; the directory refuses old ones."""
        self._epochs[scopes] = epochs
        self._epochs.move_to_end(scopes)
        if len(self._epochs) > _REMEMBERED_EPOCHS:
            self._epochs.popitem(last=False)

    def _plan_scopes(self, request: PlanRequest) -> tuple[str, ...]:
        """The scopes of tenant and model, and of the public namespace where that is another."""
        tenants = dict.fromkeys((request.namespace.tenant, PUBLIC_TENANT))
        tenant, *public = map(self._keys.tenant_scope, tenants)
        return (tenant, self._keys.model_scope(request.model), *public)

    def _wanted(self, request: PlanRequest, epochs: Sequence[int]) -> tuple[Wanted, ...]:
        """`epochs` are those of the plan's scopes, in their order."""
        tenant, model, *public = epochs

        def keys(namespace: Namespace, tenant_epoch: int) -> EntryKeys:
            owner = KeyOwner(namespace, request.model, Epochs(tenant_epoch, model), request.profile_digest)
            return self._keys.entry_keys(owner)

        names = _PlanNames(
            own=keys(request.namespace, tenant),
            public=keys(_PUBLIC, public[0]) if public else None,
            documents=self._keys.document_scopes(request.namespace.tenant),
        )
        return tuple([names.wanted(entry) for entry in request.entries])

    async def renew(self, lease_id: str, lease_seconds: float) -> None:
        """Prolong a lease and its tickets.

        Raises:
            InvalidOrderError: the duration is malformed.
            UnknownLeaseError: the lease has lapsed or was released.
        """
        await self._directory.renew(lease_id, self._lease_seconds(lease_seconds))

    async def release(self, *lease_ids: str) -> None:
        """End leases and free their unpublished tickets; idempotent."""
        await self._directory.release(*lease_ids)

    async def publish(self, order: PublishOrder) -> PublishResult:
        """Make a written state visible; see `Directory.publish`.

        Raises:
            InvalidOrderError: a field is malformed.
            UnknownWorkerError: the worker has no live heartbeat.
        """
        _check(len(order.key) == KEY_BYTES, f"key: must have {KEY_BYTES} bytes")
        _check(bool(order.worker_id), "worker_id: must not be empty")
        _check(order.size_bytes > 0, "size_bytes: must be positive")
        return await self._publish(order)

    async def publish_copy(self, order: CopyOrder) -> PublishResult:
        """Add a worker as another holder of an entry, whose bytes it has from one that holds it.

        FENCED where the receipt opens nothing, or the entry that it describes is not the published one any more.

        Raises:
            InvalidOrderError: a field is malformed.
            UnknownWorkerError: the worker has no live heartbeat.
        """
        _check(len(order.key) == KEY_BYTES, f"key: must have {KEY_BYTES} bytes")
        _check(bool(order.worker_id), "worker_id: must not be empty")
        record = self._receipts.open(order.holder_receipt, order.holder_id, order.key)
        if record is None:
            return PublishResult(PublishOutcome.FENCED, (), b"")
        copied = PublishOrder(order.key, record.ticket_id, record.fence, order.worker_id, order.tier, record.size_bytes)
        return await self._publish(copied)

    async def _publish(self, order: PublishOrder) -> PublishResult:
        reply = await self._directory.publish(order)
        receipt = self._receipts.sign(order.worker_id, reply.record) if reply.record else b""
        return PublishResult(reply.outcome, reply.drop_keys, receipt)

    async def invalidate_document(self, tenant: str, document_id: str) -> Removal:
        """Make a tenant's document unreachable under every salt."""
        return await self._directory.invalidate(self._document_scope(tenant, document_id))

    async def invalidate_tag(self, tenant: str, tag: str) -> Removal:
        """Make every document of a tenant unreachable that was registered with a tag."""
        _check(bool(tag), "tag: must not be empty")
        return await self._directory.invalidate(self._keys.tag_scope(tenant, tag))

    async def invalidate_tenant(self, tenant: str) -> Removal:
        """Make everything of a tenant unreachable."""
        return await self._directory.invalidate(self._keys.tenant_scope(tenant))

    async def invalidate_model(self, model: str) -> Removal:
        """Make everything that a model computed unreachable, of every tenant."""
        _check(bool(model), "model: must not be empty")
        return await self._directory.invalidate(self._keys.model_scope(model))

    def _document_scope(self, tenant: str, document_id: str) -> str:
        _check(bool(document_id), "document_id: must not be empty")
        return self._keys.document_scope(tenant, document_id)

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """Living workers by id."""
        return await self._directory.list_workers()

    async def evictions(self) -> tuple[Eviction, ...]:
        """See `Directory.evictions`; with the names of tenants that have planned here since this process began."""
        name = self._tenants.name_of
        return tuple(
            replace(row, evictor=name(row.evictor), victim=name(row.victim))
            for row in await self._directory.evictions()
        )

    async def heartbeat(self, worker: WorkerRecord, resident: Sequence[ResidentCopy]) -> tuple[bytes, ...]:
        """Note a worker's life and copies; the keys that it is to drop.

        Copies that the directory does not know are restored from their receipts where these are genuine and current.

        Raises:
            InvalidOrderError: a field is malformed.
        """
        _check(bool(worker.worker_id), "worker_id: must not be empty")
        _check(bool(worker.address), "address: must not be empty")
        _check(all(len(copy.key) == KEY_BYTES for copy in resident), f"resident.key: must have {KEY_BYTES} bytes")
        reply = await self._directory.heartbeat(worker, [Copy(copy.key, copy.tier) for copy in resident])
        unknown = set(reply.unknown_keys)
        claims = self._claims(worker.worker_id, [copy for copy in resident if copy.key in unknown])
        refused = await self._directory.restore(worker.worker_id, claims) if claims else ()
        unproven = unknown - {claim.record.key for claim in claims}
        return (*reply.drop_keys, *refused, *sorted(unproven))

    def _claims(self, worker_id: str, copies: Sequence[ResidentCopy]) -> list[Claim]:
        opened = ((self._receipts.open(copy.receipt, worker_id, copy.key), copy.tier) for copy in copies)
        return [Claim(record, tier) for record, tier in opened if record is not None]

    def _lease_seconds(self, requested: float) -> float:
        _check(
            math.isfinite(requested) and 0 <= requested <= _MAX_LEASE_SECONDS,
            f"lease_seconds: must lie between 0 (default) and {_MAX_LEASE_SECONDS:.0f}",
        )
        return requested or self._default_lease_seconds


@dataclass(frozen=True, slots=True)
class _PlanNames:
    """How the directory names what a plan asks for; `public` is None where the plan's own namespace is the public one."""

    own: EntryKeys
    public: EntryKeys | None
    documents: DocumentScopes

    def wanted(self, entry: PartEntry) -> Wanted:
        """The entry as the directory is asked for it."""
        # Only registered documents are public, so a snapshot is never worth a second look.
        public = self.public if entry.kind is EntryKind.SEGMENT else None
        refs = [DocumentRef(self.documents.scope(each.document_id), each.digest) for each in entry.documents]
        key = self.own.key(entry.kind, entry.content_hash)
        public_key = public.key(entry.kind, entry.content_hash) if public else None
        return Wanted(key, entry.kind, entry.num_tokens, tuple(refs), public_key)


def _check_plan(request: PlanRequest) -> None:
    _check(bool(request.model), "model: must not be empty")
    _check(bool(request.profile_digest), "profile_digest: must not be empty")
    for index, entry in enumerate(request.entries):
        if len(entry.content_hash) != KEY_BYTES:
            raise InvalidOrderError(f"entries[{index}].content_hash: must have {KEY_BYTES} bytes")
        if entry.num_tokens <= 0:
            raise InvalidOrderError(f"entries[{index}].num_tokens: must be positive")
        for place, document in enumerate(entry.documents):
            if not document.document_id:
                raise InvalidOrderError(f"entries[{index}].documents[{place}].id: must not be empty")
            if len(document.digest) != DIGEST_BYTES:
                raise InvalidOrderError(f"entries[{index}].documents[{place}].digest: must have {DIGEST_BYTES} bytes")


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidOrderError(message)
