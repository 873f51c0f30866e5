"""gRPC client of the cache service's calls about documents."""

from collections.abc import Awaitable
from typing import TypeVar

import grpc
from hypic.v1 import cache_pb2, cache_pb2_grpc

from services.common.errors import error_from_status
from services.common.rpc import request_metadata
from services.router.adapters.messages import namespace_message
from services.router.domain.lifecycle import (
    DocumentDraft,
    DocumentInfo,
    DocumentPage,
    Holder,
    RegisterAnswer,
    Removal,
    RemovedCopies,
    ScopeKind,
    StateInfo,
)
from services.router.domain.pins import PinInfo
from services.router.domain.request import Namespace

__all__ = ["GrpcDocuments"]

_OUTCOMES = {
    cache_pb2.REGISTER_OUTCOME_CREATED: "created",
    cache_pb2.REGISTER_OUTCOME_REPLACED: "replaced",
    cache_pb2.REGISTER_OUTCOME_UNCHANGED: "unchanged",
}
_KINDS = {cache_pb2.ENTRY_KIND_SEGMENT: "segment", cache_pb2.ENTRY_KIND_PREFIX: "prefix"}

Response = TypeVar("Response")


class GrpcDocuments:
    """The cache service behind a channel; implements `DocumentDirectory` and `PinDirectory`."""

    def __init__(self, channel: grpc.aio.Channel, timeout_seconds: float) -> None:
        self._stub = cache_pb2_grpc.CacheServiceStub(channel)
        self._timeout_seconds = timeout_seconds

    async def register(self, namespace: Namespace, draft: DocumentDraft, num_tokens: int) -> RegisterAnswer:
        """See `DocumentDirectory`."""
        request = cache_pb2.RegisterDocumentRequest(
            namespace=namespace_message(namespace),
            document=cache_pb2.DocumentRef(id=draft.document.document_id, digest=draft.document.digest),
            title=draft.document.title,
            tags=draft.tags,
            num_tokens=num_tokens,
        )
        response = await _call(
            self._stub.RegisterDocument(request, timeout=self._timeout_seconds, metadata=request_metadata())
        )
        return RegisterAnswer(_OUTCOMES[response.outcome], _removal(response.removed))

    async def find(self, namespace: Namespace, document_id: str) -> DocumentInfo | None:
        """See `DocumentDirectory`."""
        request = cache_pb2.DescribeDocumentRequest(namespace=namespace_message(namespace), document_id=document_id)
        response = await _call(
            self._stub.DescribeDocument(request, timeout=self._timeout_seconds, metadata=request_metadata())
        )
        return _info(response.document, document_id) if response.HasField("document") else None

    async def page(self, namespace: Namespace, after: str, limit: int) -> DocumentPage:
        """See `DocumentDirectory`."""
        request = cache_pb2.ListDocumentsRequest(namespace=namespace_message(namespace), after=after, limit=limit)
        response = await _call(
            self._stub.ListDocuments(request, timeout=self._timeout_seconds, metadata=request_metadata())
        )
        return DocumentPage(tuple(_info(each, "") for each in response.documents), response.has_more)

    async def invalidate(self, namespace: Namespace, kind: ScopeKind, name: str) -> Removal:
        """See `DocumentDirectory`."""
        request = cache_pb2.InvalidateRequest(namespace=namespace_message(namespace))
        match kind:
            case ScopeKind.DOCUMENT:
                request.document_id = name
            case ScopeKind.TAG:
                request.tag = name
            case ScopeKind.TENANT:
                request.whole_tenant = True
            case ScopeKind.MODEL:
                request.model = name
        return _removal(
            await _call(self._stub.Invalidate(request, timeout=self._timeout_seconds, metadata=request_metadata()))
        )

    async def pin(self, namespace: Namespace, document_id: str) -> PinInfo:
        """See `PinDirectory`."""
        request = _pin_request(namespace, document_id)
        return _pin_info(
            await _call(self._stub.Pin(request, timeout=self._timeout_seconds, metadata=request_metadata()))
        )

    async def unpin(self, namespace: Namespace, document_id: str) -> PinInfo:
        """See `PinDirectory`."""
        request = _pin_request(namespace, document_id)
        return _pin_info(
            await _call(self._stub.Unpin(request, timeout=self._timeout_seconds, metadata=request_metadata()))
        )


def _pin_request(namespace: Namespace, document_id: str) -> cache_pb2.PinRequest:
    if document_id:
        return cache_pb2.PinRequest(namespace=namespace_message(namespace), document_id=document_id)
    return cache_pb2.PinRequest(namespace=namespace_message(namespace), whole_tenant=True)


def _pin_info(message: cache_pb2.PinResponse) -> PinInfo:
    return PinInfo(message.num_entries, message.promised_bytes, message.limit_bytes)


async def _call(call: Awaitable[Response]) -> Response:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_from_status(error) from error


def _removal(message: cache_pb2.InvalidateResponse) -> Removal:
    copies = (
        RemovedCopies(each.worker_id, each.tier, each.num_entries, each.size_bytes, tuple(each.keys))
        for each in message.copies
    )
    return Removal(message.num_entries, message.num_documents, tuple(copies))


def _info(message: cache_pb2.DocumentDescription, document_id: str) -> DocumentInfo:
    registered = message.registered
    return DocumentInfo(
        document_id=registered.document.id or document_id,
        title=registered.title,
        tags=tuple(registered.tags),
        digest=registered.document.digest,
        num_tokens=registered.num_tokens,
        version=registered.version,
        states=tuple(map(_state, message.states)),
        is_pinned=message.pinned,
    )


def _state(message: cache_pb2.StoredState) -> StateInfo:
    holders = tuple(Holder(each.worker_id, each.tier) for each in message.holders)
    return StateInfo(
        message.key_digest, _KINDS.get(message.kind, "unknown"), message.num_tokens, message.size_bytes, holders
    )
