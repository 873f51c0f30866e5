"""The worker's side of the cache service: publish what it stored, report what it holds, drop what it is told to."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import grpc
from hypic.v1 import cache_pb2, cache_pb2_grpc

from services.common.errors import error_from_status
from services.common.rpc import request_metadata

__all__ = ["CacheClient", "Published", "WorkerIdentity", "WorkerReport"]

_CALL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """How the directory knows this worker. roles: at least one of `cache_pb2.WorkerRole`."""

    worker_id: str
    address: str
    model: str
    profile_digest: str
    tier: str
    roles: tuple[cache_pb2.WorkerRole.ValueType, ...] = (
        cache_pb2.WORKER_ROLE_PREFILL,
        cache_pb2.WORKER_ROLE_COMBINE,
    )


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a heartbeat says beside who it is."""

    resident: Sequence[cache_pb2.ResidentEntry]
    load: cache_pb2.WorkerLoad
    speeds: cache_pb2.WorkerSpeeds
    is_draining: bool


@dataclass(frozen=True, slots=True)
class Published:
    """An answer to Publish. refusal: empty when accepted; drop_keys: evicted copies of this worker."""

    refusal: str
    receipt: bytes
    drop_keys: tuple[bytes, ...]


class CacheClient:
    """Calls with deadlines; every method raises UnavailableError and its kin when the cache service does not answer."""

    def __init__(self, channel: grpc.aio.Channel, identity: WorkerIdentity) -> None:
        self._stub = cache_pb2_grpc.CacheServiceStub(channel)
        self._identity = identity

    async def publish(self, key: bytes, ticket_id: str, fence: int, size_bytes: int) -> Published:
        """Make a stored state visible to other requests."""
        request = cache_pb2.PublishRequest(
            key=key,
            ticket_id=ticket_id,
            fence=fence,
            worker_id=self._identity.worker_id,
            tier=self._identity.tier,
            size_bytes=size_bytes,
        )
        return await self._published(self._stub.Publish(request, timeout=_CALL_SECONDS, metadata=request_metadata()))

    async def publish_copy(self, key: bytes, holder_id: str, holder_receipt: bytes) -> Published:
        """Make a copy visible that came from another worker."""
        request = cache_pb2.PublishCopyRequest(
            key=key,
            worker_id=self._identity.worker_id,
            tier=self._identity.tier,
            holder_id=holder_id,
            holder_receipt=holder_receipt,
        )
        return await self._published(
            self._stub.PublishCopy(request, timeout=_CALL_SECONDS, metadata=request_metadata())
        )

    async def _published(self, call: Awaitable[cache_pb2.PublishResponse]) -> Published:
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        accepted = response.outcome == cache_pb2.PUBLISH_OUTCOME_ACCEPTED
        name = cache_pb2.PublishOutcome.Name(response.outcome)
        refusal = "" if accepted else name.removeprefix("PUBLISH_OUTCOME_").lower()
        return Published(refusal, response.receipt, tuple(response.drop_keys))

    async def heartbeat(self, report: WorkerReport) -> cache_pb2.HeartbeatResponse:
        """A sign of life; see worker and cache protocols."""
        request = cache_pb2.HeartbeatRequest(
            worker_id=self._identity.worker_id,
            address=self._identity.address,
            model=self._identity.model,
            profile_digest=self._identity.profile_digest,
            resident=report.resident,
            load=report.load,
            roles=self._identity.roles,
            speeds=report.speeds,
            draining=report.is_draining,
        )
        try:
            return await self._stub.Heartbeat(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
