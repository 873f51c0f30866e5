"""The life of documents: registered and captured ahead of any request, described, and taken away."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import TypeVar

from services.common.content import content_hash
from services.common.errors import ConflictError, DeadlineError, HypicError, UnavailableError
from services.common.telemetry import get_logger, new_request_id
from services.router.background import Background
from services.router.captures import Capturer
from services.router.domain.assignment import ColdSegment
from services.router.domain.lifecycle import (
    DirectoryLostError,
    DocumentDirectory,
    DocumentDraft,
    DocumentInfo,
    DocumentNotFoundError,
    DocumentPage,
    Registered,
    Removal,
    RemovedCopies,
    ScopeKind,
    document_ref,
)
from services.router.domain.parts import Part, PartKind, Reason
from services.router.domain.pins import PinDirectory, PinInfo, PinRefusedError
from services.router.domain.placing import state_bytes
from services.router.domain.plan import CacheEntry, EntryKind, Outcome, Served
from services.router.domain.ports import CaptureOrder, Directory, PlanQuery, Workers
from services.router.domain.request import Namespace
from services.router.reuse import ReusePolicy
from services.router.served_model import Models, ServedModel

__all__ = ["Library", "LibraryServices"]

_PAUSE_SECONDS = 0.05

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class LibraryServices:
    """What the library works with."""

    documents: DocumentDirectory
    pins: PinDirectory
    directory: Directory
    workers: Workers
    capturer: Capturer
    background: Background
    policy: ReusePolicy


class Library:
    """Documents of all tenants. Every method raises `DirectoryLostError` while the cache service does not answer."""

    def __init__(self, models: Models, services: LibraryServices) -> None:
        self._models = models
        self._services = services

    async def register(self, namespace: Namespace, draft: DocumentDraft) -> Registered:
        """Make a text the current one of its id, and capture it unless its state is stored.

        A capture that fails leaves the document registered: requests that bring it compute it.

        Raises:
            PromptError: the text can never be served.
            UnavailableError: no worker is there.
        """
        model = self._models.require()
        part = await asyncio.to_thread(model.assembler.document_part, draft.document)
        answer = await _reach(self._services.documents.register(namespace, draft, part.num_tokens))
        removal = await self._drop(answer.removal)
        reason = await self._capture(namespace, model, draft, part)
        info = await self.find(namespace, draft.document.document_id)
        return Registered(answer.outcome, info, reason, removal)

    async def find(self, namespace: Namespace, document_id: str) -> DocumentInfo:
        """A document and what is stored of it.

        Raises:
            DocumentNotFoundError: nothing is known of it.
        """
        found = await _reach(self._services.documents.find(namespace, document_id))
        if found is None:
            raise DocumentNotFoundError(document_id)
        return found

    async def page(self, namespace: Namespace, after: str, limit: int) -> DocumentPage:
        """Registered documents behind an id."""
        return await _reach(self._services.documents.page(namespace, after, limit))

    async def invalidate(self, namespace: Namespace, kind: ScopeKind, name: str = "") -> Removal:
        """Make a scope unreachable for every later plan, and tell the worker to drop its copies.

        Raises:
            DocumentNotFoundError: nothing was known of the document.
        """
        removal = await _reach(self._services.documents.invalidate(namespace, kind, name))
        if kind is ScopeKind.DOCUMENT and not removal.num_documents and not removal.num_entries:
            raise DocumentNotFoundError(name)
        return await self._drop(removal)

    async def pin(self, namespace: Namespace, document_id: str) -> PinInfo:
        """Evict no segment state of a document, or of the whole tenant where the id is empty.

        Raises:
            PinRefusedError: pins would keep more than they may.
        """
        try:
            return await _reach(self._services.pins.pin(namespace, document_id))
        except ConflictError as error:
            raise PinRefusedError(str(error)) from error

    async def unpin(self, namespace: Namespace, document_id: str) -> PinInfo:
        """Take a pin back, where there is one."""
        return await _reach(self._services.pins.unpin(namespace, document_id))

    async def _capture(self, namespace: Namespace, model: ServedModel, draft: DocumentDraft, part: Part) -> str:
        """Why no state is stored; empty when one is."""
        if part.kind is not PartKind.SEGMENT:
            return Reason.TOO_SHORT
        policy = self._services.policy
        digest = model.info.profile.digest
        content = content_hash(digest, part.token_ids)
        entry = CacheEntry(EntryKind.SEGMENT, content, part.num_tokens, (document_ref(draft.document),))
        query = PlanQuery(
            request_id=new_request_id(),
            namespace=namespace,
            model=model.info.revision,
            profile_digest=digest,
            entries=(entry,),
            lease_seconds=min(2 * policy.capture_timeout_seconds, 3600.0),
            admit_all=True,
        )
        try:
            return await self._capture_planned(query, model, part)
        except HypicError as error:
            get_logger().warning("capture_ahead_failed", error=str(error))
            return Reason.CAPTURE_FAILED

    async def _capture_planned(self, query: PlanQuery, model: ServedModel, part: Part) -> str:
        directory, policy = self._services.directory, self._services.policy
        answer = await directory.plan(query, policy.cache_timeout_seconds)
        query = replace(query, lease_id=answer.lease_id)
        try:
            outcome = answer.outcomes[0]
            give_up = time.monotonic() + policy.capture_timeout_seconds
            while outcome.served is Served.PENDING and time.monotonic() < give_up:
                await asyncio.sleep(_PAUSE_SECONDS)
                outcome = (await directory.plan(query, policy.cache_timeout_seconds)).outcomes[0]
            return await self._capture_cold(outcome, model, part)
        finally:
            self._services.background.spawn(directory.release(query.lease_id, policy.cache_timeout_seconds))

    async def _capture_cold(self, outcome: Outcome, model: ServedModel, part: Part) -> str:
        if outcome.served is Served.HIT:
            return ""
        if outcome.served is Served.LIVE:
            return Reason.SUPERSEDED
        if outcome.ticket is None:
            return Reason.COMPUTED_ELSEWHERE
        order = CaptureOrder(outcome.key, part.token_ids, outcome.ticket)
        segment = ColdSegment(outcome.key, part.num_tokens, state_bytes(model.info, part.num_tokens))
        timeout = self._services.policy.capture_timeout_seconds
        done = await self._services.capturer.capture_apart([segment], [order], timeout)
        return "" if done.stored else done.reasons.get(order.key, Reason.CAPTURE_FAILED)

    async def _drop(self, removal: Removal) -> Removal:
        """Tell the worker at once what its next heartbeat would tell it."""
        return replace(removal, copies=tuple([await self._drop_copies(copies) for copies in removal.copies]))

    async def _drop_copies(self, copies: RemovedCopies) -> RemovedCopies:
        try:
            worker = self._services.workers.find(copies.worker_id)
            await worker.drop(copies.keys, self._services.policy.cache_timeout_seconds)
        except HypicError as error:
            get_logger().warning("drop_failed", error=str(error))
            return copies
        return replace(copies, is_dropped=len(copies.keys) == copies.num_entries)


async def _reach(call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except (UnavailableError, DeadlineError) as error:
        get_logger().warning("directory_lost", error=str(error))
        raise DirectoryLostError from error
