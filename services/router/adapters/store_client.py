"""gRPC client of the cache service's calls about the store as a whole."""

import grpc
from hypic.v1 import cache_pb2, cache_pb2_grpc

from services.common.errors import error_from_status
from services.common.rpc import request_metadata
from services.router.domain.store import Eviction

__all__ = ["GrpcStore"]


class GrpcStore:
    """The cache service behind a channel; implements `StoreDirectory`."""

    def __init__(self, channel: grpc.aio.Channel, timeout_seconds: float) -> None:
        self._stub = cache_pb2_grpc.CacheServiceStub(channel)
        self._timeout_seconds = timeout_seconds

    async def evictions(self) -> tuple[Eviction, ...]:
        """See `StoreDirectory`."""
        request = cache_pb2.ListEvictionsRequest()
        try:
            response = await self._stub.ListEvictions(
                request, timeout=self._timeout_seconds, metadata=request_metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        return tuple(
            Eviction(row.evictor, row.victim, row.num_entries, row.size_bytes, row.num_tokens)
            for row in response.evictions
        )
