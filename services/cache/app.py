"""The cache service's calls: message in, domain call, message out."""

from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import aclosing, contextmanager

import grpc
from google.protobuf.message import Message
from hypic.v1 import cache_pb2 as pb
from hypic.v1 import cache_pb2_grpc
from typing_extensions import override

from services.cache.adapters import document_messages, messages
from services.cache.adapters.plan_streams import PlanStreams
from services.cache.domain.cache import SegmentCache
from services.cache.domain.documents import DocumentRegistry
from services.cache.domain.errors import CacheError, InvalidOrderError
from services.cache.domain.pins import Pins
from services.cache.domain.values import Removal
from services.common.errors import HypicError, InternalError
from services.common.telemetry import get_logger, set_request_id
from services.common.tracing import serve_rpc

__all__ = ["CacheServicer"]

_PLAN = "hypic.v1.CacheService/Plan"
_PIN_SCOPES = "scope: one of document_id and whole_tenant = true must be set"
_Context = grpc.aio.ServicerContext[Message, Message]


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """`hypic.v1.CacheService` over a `SegmentCache` and a `DocumentRegistry`."""

    def __init__(self, cache: SegmentCache, documents: DocumentRegistry, pins: Pins, worker_ttl_seconds: float) -> None:
        self._cache = cache
        self._documents = documents
        self._pins = pins
        self._worker_ttl_seconds = worker_ttl_seconds
        self._plans = PlanStreams(self._plan)

    def drain(self) -> None:
        """Let streams end, once what they brought is answered."""
        self._plans.drain()

    @override
    async def Plan(
        self, request_iterator: AsyncIterable[pb.PlanRequest], context: _Context
    ) -> AsyncGenerator[pb.PlanResponse]:
        """Lease hits, give tickets for cold parts, name the pending ones; for every request of the stream."""
        async with aclosing(self._plans.serve(request_iterator)) as responses:
            async for response in responses:
                yield response

    async def _plan(self, request: pb.PlanRequest) -> pb.PlanResponse:
        set_request_id(request.request_id)
        try:
            with serve_rpc(_PLAN, request.traceparent), _wire_errors():
                reply = await self._cache.plan(messages.plan_request(request))
            return messages.plan_message(request.call, reply)
        except HypicError as error:
            return messages.plan_failure(request.call, error)
        except Exception:
            get_logger().exception("rpc_failed")
            return messages.plan_failure(
                request.call, InternalError("the plan failed; the cache service's log says why")
            )

    @override
    async def Renew(self, request: pb.RenewRequest, context: _Context) -> pb.RenewResponse:
        """Prolong a lease."""
        with _wire_errors():
            await self._cache.renew(request.lease_id, request.lease_seconds)
        return pb.RenewResponse()

    @override
    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseResponse:
        """End leases."""
        with _wire_errors():
            await self._cache.release(*request.lease_ids)
        return pb.ReleaseResponse()

    @override
    async def Publish(self, request: pb.PublishRequest, context: _Context) -> pb.PublishResponse:
        """Make a written state visible."""
        with _wire_errors():
            return messages.publish_message(await self._cache.publish(messages.publish_order(request)))

    @override
    async def PublishCopy(self, request: pb.PublishCopyRequest, context: _Context) -> pb.PublishResponse:
        """Make a fetched copy visible."""
        with _wire_errors():
            return messages.publish_message(await self._cache.publish_copy(messages.copy_order(request)))

    @override
    async def Invalidate(self, request: pb.InvalidateRequest, context: _Context) -> pb.InvalidateResponse:
        """Make a document, a tag's documents, a tenant or a model unreachable."""
        with _wire_errors():
            removal = await self._invalidate(request)
        get_logger().info("invalidated", scope=request.WhichOneof("scope"), num_entries=removal.num_entries)
        return document_messages.removal_message(removal)

    async def _invalidate(self, request: pb.InvalidateRequest) -> Removal:
        match request.WhichOneof("scope"):
            case "document_id":
                return await self._cache.invalidate_document(request.namespace.tenant, request.document_id)
            case "tag":
                return await self._cache.invalidate_tag(request.namespace.tenant, request.tag)
            case "whole_tenant" if request.whole_tenant:
                return await self._cache.invalidate_tenant(request.namespace.tenant)
            case "model":
                return await self._cache.invalidate_model(request.model)
            case _:
                raise InvalidOrderError("scope: one of document_id, tag, whole_tenant = true and model must be set")

    @override
    async def RegisterDocument(
        self, request: pb.RegisterDocumentRequest, context: _Context
    ) -> pb.RegisterDocumentResponse:
        """Make one text the current one of a document id."""
        with _wire_errors():
            record = document_messages.document_record(request)
            reply = await self._documents.register(request.namespace.tenant, record)
        get_logger().info("registered", outcome=reply.outcome, num_removed=reply.removal.num_entries)
        return document_messages.register_message(reply)

    @override
    async def DescribeDocument(
        self, request: pb.DescribeDocumentRequest, context: _Context
    ) -> pb.DescribeDocumentResponse:
        """One document and what is stored of it."""
        with _wire_errors():
            found = await self._documents.describe(request.namespace.tenant, request.document_id)
        return document_messages.description_response(found)

    @override
    async def ListDocuments(self, request: pb.ListDocumentsRequest, context: _Context) -> pb.ListDocumentsResponse:
        """A page of a tenant's registered documents."""
        with _wire_errors():
            page = await self._documents.page(request.namespace.tenant, request.after, request.limit)
        return document_messages.page_message(page)

    @override
    async def Pin(self, request: pb.PinRequest, context: _Context) -> pb.PinResponse:
        """Keep a document's or a tenant's segments from being evicted."""
        namespace = request.namespace
        with _wire_errors():
            match request.WhichOneof("scope"):
                case "document_id":
                    reply = await self._pins.pin_document(namespace.tenant, request.document_id)
                case "whole_tenant" if request.whole_tenant:
                    reply = await self._pins.pin_tenant(namespace.tenant, namespace.budget_bytes)
                case _:
                    raise InvalidOrderError(_PIN_SCOPES)
        return document_messages.pin_message(reply)

    @override
    async def Unpin(self, request: pb.PinRequest, context: _Context) -> pb.PinResponse:
        """Take a pin back."""
        with _wire_errors():
            match request.WhichOneof("scope"):
                case "document_id":
                    reply = await self._pins.unpin_document(request.namespace.tenant, request.document_id)
                case "whole_tenant" if request.whole_tenant:
                    reply = await self._pins.unpin_tenant(request.namespace.tenant)
                case _:
                    raise InvalidOrderError(_PIN_SCOPES)
        return document_messages.pin_message(reply)

    @override
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: _Context) -> pb.HeartbeatResponse:
        """Note a worker's life and copies."""
        with _wire_errors():
            resident = messages.resident_copies(request)
            drop_keys = await self._cache.heartbeat(messages.worker_record(request), resident)
        return pb.HeartbeatResponse(drop_keys=drop_keys, time_to_live_seconds=self._worker_ttl_seconds)

    @override
    async def ListWorkers(self, request: pb.ListWorkersRequest, context: _Context) -> pb.ListWorkersResponse:
        """Living workers."""
        with _wire_errors():
            return messages.workers_message(await self._cache.list_workers())

    @override
    async def ListEvictions(self, request: pb.ListEvictionsRequest, context: _Context) -> pb.ListEvictionsResponse:
        """Who evicted whom."""
        with _wire_errors():
            return messages.evictions_message(await self._cache.evictions())


@contextmanager
def _wire_errors() -> Iterator[None]:
    try:
        yield
    except CacheError as error:
        raise messages.wire_error(error) from error
