"""Leases that end within a moment are released in one call: nobody waits for it, and it costs what a plan's call does."""

import asyncio

import grpc
from hypic.v1 import cache_pb2, cache_pb2_grpc

from services.common.errors import error_from_status
from services.common.rpc import request_metadata
from services.common.telemetry import get_logger

__all__ = ["GatheredReleases"]

_GATHER_SECONDS = 0.05
_LATE_SECONDS = 2.0


class GatheredReleases:
    """Every caller waits for the call that its lease goes with, and gets that call's error."""

    def __init__(self, stub: "cache_pb2_grpc.CacheServiceAsyncStub") -> None:
        self._stub = stub
        self._lease_ids: list[str] = []
        self._sending: asyncio.Task[None] | None = None

    async def release(self, lease_id: str, timeout_seconds: float) -> None:
        """End a lease. A caller that is cancelled takes no other lease along.

        Raises:
            HypicError: the cache service did not answer in time.
        """
        await asyncio.shield(self._gather(lease_id, timeout_seconds))

    def release_late(self, lease_id: str) -> None:
        """End a lease that nobody knows of; where this fails, it lapses."""
        self._gather(lease_id, _LATE_SECONDS).add_done_callback(_note)

    def _gather(self, lease_id: str, timeout_seconds: float) -> "asyncio.Task[None]":
        self._lease_ids.append(lease_id)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(timeout_seconds))
        return self._sending

    async def _send(self, timeout_seconds: float) -> None:
        await asyncio.sleep(_GATHER_SECONDS)
        request = cache_pb2.ReleaseRequest(lease_ids=self._lease_ids)
        self._lease_ids, self._sending = [], None
        try:
            await self._stub.Release(request, timeout=timeout_seconds, metadata=request_metadata())
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error


def _note(sending: "asyncio.Task[None]") -> None:
    if not sending.cancelled() and (error := sending.exception()):
        get_logger().warning("late_release_failed", error=str(error))
