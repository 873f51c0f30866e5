"""The cache service's calls: message in, domain call, message out."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.protobuf.message import Message
from hypic.v1 import cache_pb2 as pb
from hypic.v1 import cache_pb2_grpc
from typing_extensions import override

from services.cache.adapters import messages
from services.cache.domain.cache import SegmentCache
from services.cache.domain.errors import CacheError, InvalidOrderError
from services.common.telemetry import get_logger

__all__ = ["CacheServicer"]

_Context = grpc.aio.ServicerContext[Message, Message]


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """`hypic.v1.CacheService` over a `SegmentCache`."""

    def __init__(self, cache: SegmentCache, worker_ttl_seconds: float) -> None:
        self._cache = cache
        self._worker_ttl_seconds = worker_ttl_seconds

    @override
    async def Plan(self, request: pb.PlanRequest, context: _Context) -> pb.PlanResponse:
        """Lease hits, give tickets for cold parts, name the pending ones."""
        with _wire_errors():
            return messages.plan_message(await self._cache.plan(messages.plan_request(request)))

    @override
    async def Renew(self, request: pb.RenewRequest, context: _Context) -> pb.RenewResponse:
        """Prolong a lease."""
        with _wire_errors():
            await self._cache.renew(request.lease_id, request.lease_seconds)
        return pb.RenewResponse()

    @override
    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseResponse:
        """End a lease."""
        with _wire_errors():
            await self._cache.release(request.lease_id)
        return pb.ReleaseResponse()

    @override
    async def Publish(self, request: pb.PublishRequest, context: _Context) -> pb.PublishResponse:
        """Make a written state visible."""
        with _wire_errors():
            return messages.publish_message(await self._cache.publish(messages.publish_order(request)))

    @override
    async def Invalidate(self, request: pb.InvalidateRequest, context: _Context) -> pb.InvalidateResponse:
        """Make a document, a tenant or a model unreachable."""
        with _wire_errors():
            num_entries = await self._invalidate(request)
        get_logger().info("invalidated", scope=request.WhichOneof("scope"), num_entries=num_entries)
        return pb.InvalidateResponse(num_entries=num_entries)

    async def _invalidate(self, request: pb.InvalidateRequest) -> int:
        match request.WhichOneof("scope"):
            case "document_id":
                return await self._cache.invalidate_document(request.namespace.tenant, request.document_id)
            case "whole_tenant" if request.whole_tenant:
                return await self._cache.invalidate_tenant(request.namespace.tenant)
            case "model":
                return await self._cache.invalidate_model(request.model)
            case _:
                raise InvalidOrderError("scope: one of document_id, whole_tenant = true and model must be set")

    @override
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: _Context) -> pb.HeartbeatResponse:
        """Note a worker's life and copies."""
        with _wire_errors():
            resident = messages.resident_copies(request)
            drop_keys = await self._cache.heartbeat(request.worker_id, request.address, resident)
        return pb.HeartbeatResponse(drop_keys=drop_keys, time_to_live_seconds=self._worker_ttl_seconds)


@contextmanager
def _wire_errors() -> Iterator[None]:
    try:
        yield
    except CacheError as error:
        raise messages.wire_error(error) from error
