"""Messages of the documents' life cycle, from and to the domain."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from hypic.v1 import cache_pb2 as pb

from services.cache.adapters.messages import ENTRY_KINDS, holder_message
from services.cache.domain.documents import DocumentDescription, DocumentPage, key_digest
from services.cache.domain.orders import PinReply, RegisterReply
from services.cache.domain.values import DocumentRecord, RegisterOutcome, Removal, RemovedCopy, StoredState

__all__ = [
    "description_response",
    "document_record",
    "page_message",
    "pin_message",
    "register_message",
    "removal_message",
]

# A worker learns of all its copies with its next heartbeat; these it can be told at once.
_MAX_KEYS = 4096
_OUTCOMES: Mapping[RegisterOutcome, pb.RegisterOutcome.ValueType] = {
    RegisterOutcome.CREATED: pb.REGISTER_OUTCOME_CREATED,
    RegisterOutcome.REPLACED: pb.REGISTER_OUTCOME_REPLACED,
    RegisterOutcome.UNCHANGED: pb.REGISTER_OUTCOME_UNCHANGED,
}


def document_record(message: pb.RegisterDocumentRequest) -> DocumentRecord:
    """The document that is to be registered; tags in order, each once."""
    return DocumentRecord(
        document_id=message.document.id,
        title=message.title,
        tags=tuple(sorted(set(message.tags))),
        digest=message.document.digest,
        num_tokens=message.num_tokens,
    )


def pin_message(reply: PinReply) -> pb.PinResponse:
    """The response to `Pin` and `Unpin`."""
    return pb.PinResponse(
        num_entries=reply.num_entries, promised_bytes=reply.promised_bytes, limit_bytes=reply.limit_bytes
    )


def register_message(reply: RegisterReply) -> pb.RegisterDocumentResponse:
    """The response to `RegisterDocument`."""
    return pb.RegisterDocumentResponse(
        outcome=_OUTCOMES[reply.outcome], version=reply.version, removed=removal_message(reply.removal)
    )


def removal_message(removal: Removal) -> pb.InvalidateResponse:
    """What an invalidation took away, summed up by worker and tier."""
    ordered = sorted(removal.copies, key=_place)
    return pb.InvalidateResponse(
        num_entries=removal.num_entries,
        num_documents=removal.num_documents,
        copies=[_copies_message(worker, tier, list(group)) for (worker, tier), group in groupby(ordered, _place)],
    )


def _place(copy: RemovedCopy) -> tuple[str, str]:
    return copy.worker_id, copy.tier


def _copies_message(worker_id: str, tier: str, copies: Sequence[RemovedCopy]) -> pb.RemovedCopies:
    return pb.RemovedCopies(
        worker_id=worker_id,
        tier=tier,
        num_entries=len(copies),
        size_bytes=sum(copy.size_bytes for copy in copies),
        keys=[copy.key for copy in copies[:_MAX_KEYS]],
    )


def description_response(description: DocumentDescription | None) -> pb.DescribeDocumentResponse:
    """The response to `DescribeDocument`."""
    return pb.DescribeDocumentResponse(document=_description_message(description) if description else None)


def page_message(page: DocumentPage) -> pb.ListDocumentsResponse:
    """The response to `ListDocuments`."""
    return pb.ListDocumentsResponse(documents=map(_description_message, page.documents), has_more=page.has_more)


def _description_message(description: DocumentDescription) -> pb.DocumentDescription:
    record = description.record
    return pb.DocumentDescription(
        registered=_record_message(record) if record else None,
        states=map(_state_message, description.states),
        pinned=description.is_pinned,
    )


def _record_message(record: DocumentRecord) -> pb.RegisteredDocument:
    return pb.RegisteredDocument(
        document=pb.DocumentRef(id=record.document_id, digest=record.digest),
        title=record.title,
        tags=record.tags,
        num_tokens=record.num_tokens,
        version=record.version,
    )


def _state_message(state: StoredState) -> pb.StoredState:
    return pb.StoredState(
        key_digest=key_digest(state.key),
        kind=ENTRY_KINDS[state.kind],
        num_tokens=state.num_tokens,
        size_bytes=state.size_bytes,
        holders=map(holder_message, state.holders),
    )
