"""A cache service that keeps its directory in dictionaries, for tests of its clients."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass, field

import grpc
from blake3 import blake3
from hypic.v1 import cache_pb2, cache_pb2_grpc

from services.common.errors import NotFoundError, UnavailableError, status_code

PlanContext = grpc.aio.ServicerContext[cache_pb2.PlanRequest, cache_pb2.PlanResponse]
RenewContext = grpc.aio.ServicerContext[cache_pb2.RenewRequest, cache_pb2.RenewResponse]
ReleaseContext = grpc.aio.ServicerContext[cache_pb2.ReleaseRequest, cache_pb2.ReleaseResponse]


@dataclass
class StubCache(cache_pb2_grpc.CacheServiceServicer):
    """Single flight and leases without time: a ticket lives until its lease ends."""

    resident: set[bytes] = field(default_factory=set)
    owners: dict[bytes, str] = field(default_factory=dict)
    leases: set[str] = field(default_factory=set)
    plans: list[cache_pb2.PlanRequest] = field(default_factory=list)
    releases: list[cache_pb2.ReleaseRequest] = field(default_factory=list)
    documents: dict[tuple[str, str], cache_pb2.RegisteredDocument] = field(default_factory=dict)
    num_streams: int = 0
    num_leases: int = 0
    num_renewals: int = 0
    is_down: bool = False
    plan_delay_seconds: float = 0.0
    owner_expires_in_seconds: float = 5.0
    # As if everything were invalidated between any two plans.
    forgets_tickets: bool = False
    publish_delay_seconds: float = 0.0
    workers: list[cache_pb2.RegisteredWorker] = field(default_factory=list)
    published: list[cache_pb2.PublishRequest] = field(default_factory=list)
    evictions: list[cache_pb2.Eviction] = field(default_factory=list)

    async def Plan(  # noqa: N802
        self, request_iterator: AsyncIterable[cache_pb2.PlanRequest], context: PlanContext
    ) -> AsyncGenerator[cache_pb2.PlanResponse]:
        self.num_streams += 1
        async for request in request_iterator:
            if self.is_down:
                failure = cache_pb2.CallFailure(status=status_code(UnavailableError()), message="the stub is down")
                yield cache_pb2.PlanResponse(call=request.call, failure=failure)
                continue
            self.plans.append(request)
            lease_id = request.lease_id or self._new_lease()
            entries = [self._plan(entry, request.namespace, lease_id) for entry in request.entries]
            await asyncio.sleep(self.plan_delay_seconds)
            yield cache_pb2.PlanResponse(lease_id=lease_id, entries=entries, call=request.call)

    async def Renew(self, request: cache_pb2.RenewRequest, context: RenewContext) -> cache_pb2.RenewResponse:  # noqa: N802
        if request.lease_id not in self.leases:
            raise NotFoundError("no such lease")
        self.num_renewals += 1
        return cache_pb2.RenewResponse()

    async def Release(  # noqa: N802
        self, request: cache_pb2.ReleaseRequest, context: ReleaseContext
    ) -> cache_pb2.ReleaseResponse:
        if self.is_down:
            raise UnavailableError("the stub is down")
        self.releases.append(request)
        self.leases.difference_update(request.lease_ids)
        self.owners = {key: lease for key, lease in self.owners.items() if lease not in request.lease_ids}
        return cache_pb2.ReleaseResponse()

    async def Publish(  # noqa: N802
        self,
        request: cache_pb2.PublishRequest,
        context: grpc.aio.ServicerContext[cache_pb2.PublishRequest, cache_pb2.PublishResponse],
    ) -> cache_pb2.PublishResponse:
        await asyncio.sleep(self.publish_delay_seconds)
        self.published.append(request)
        self.publish(request.key)
        return cache_pb2.PublishResponse(outcome=cache_pb2.PUBLISH_OUTCOME_ACCEPTED)

    async def Invalidate(  # noqa: N802
        self,
        request: cache_pb2.InvalidateRequest,
        context: grpc.aio.ServicerContext[cache_pb2.InvalidateRequest, cache_pb2.InvalidateResponse],
    ) -> cache_pb2.InvalidateResponse:
        num_entries = len(self.resident)
        self.resident.clear()
        return cache_pb2.InvalidateResponse(num_entries=num_entries)

    async def Pin(  # noqa: N802
        self,
        request: cache_pb2.PinRequest,
        context: grpc.aio.ServicerContext[cache_pb2.PinRequest, cache_pb2.PinResponse],
    ) -> cache_pb2.PinResponse:
        return cache_pb2.PinResponse()

    async def Unpin(  # noqa: N802
        self,
        request: cache_pb2.PinRequest,
        context: grpc.aio.ServicerContext[cache_pb2.PinRequest, cache_pb2.PinResponse],
    ) -> cache_pb2.PinResponse:
        return cache_pb2.PinResponse()

    async def Heartbeat(  # noqa: N802
        self,
        request: cache_pb2.HeartbeatRequest,
        context: grpc.aio.ServicerContext[cache_pb2.HeartbeatRequest, cache_pb2.HeartbeatResponse],
    ) -> cache_pb2.HeartbeatResponse:
        return cache_pb2.HeartbeatResponse(time_to_live_seconds=30)

    async def ListEvictions(  # noqa: N802
        self,
        request: cache_pb2.ListEvictionsRequest,
        context: grpc.aio.ServicerContext[cache_pb2.ListEvictionsRequest, cache_pb2.ListEvictionsResponse],
    ) -> cache_pb2.ListEvictionsResponse:
        if self.is_down:
            raise UnavailableError("the stub is down")
        return cache_pb2.ListEvictionsResponse(evictions=self.evictions)

    async def ListWorkers(  # noqa: N802
        self,
        request: cache_pb2.ListWorkersRequest,
        context: grpc.aio.ServicerContext[cache_pb2.ListWorkersRequest, cache_pb2.ListWorkersResponse],
    ) -> cache_pb2.ListWorkersResponse:
        if self.is_down:
            raise UnavailableError("the stub is down")
        return cache_pb2.ListWorkersResponse(workers=self.workers)

    async def PublishCopy(  # noqa: N802
        self,
        request: cache_pb2.PublishCopyRequest,
        context: grpc.aio.ServicerContext[cache_pb2.PublishCopyRequest, cache_pb2.PublishResponse],
    ) -> cache_pb2.PublishResponse:
        return cache_pb2.PublishResponse(outcome=cache_pb2.PUBLISH_OUTCOME_FENCED)

    async def RegisterDocument(  # noqa: N802
        self,
        request: cache_pb2.RegisterDocumentRequest,
        context: grpc.aio.ServicerContext[cache_pb2.RegisterDocumentRequest, cache_pb2.RegisterDocumentResponse],
    ) -> cache_pb2.RegisterDocumentResponse:
        if self.is_down:
            raise UnavailableError("the stub is down")
        registered = cache_pb2.RegisteredDocument(
            document=request.document,
            title=request.title,
            tags=request.tags,
            num_tokens=request.num_tokens,
            version=len(self.documents) + 1,
        )
        self.documents[request.namespace.tenant, request.document.id] = registered
        return cache_pb2.RegisterDocumentResponse(
            outcome=cache_pb2.REGISTER_OUTCOME_CREATED, version=registered.version
        )

    async def DescribeDocument(  # noqa: N802
        self,
        request: cache_pb2.DescribeDocumentRequest,
        context: grpc.aio.ServicerContext[cache_pb2.DescribeDocumentRequest, cache_pb2.DescribeDocumentResponse],
    ) -> cache_pb2.DescribeDocumentResponse:
        found = self.documents.get((request.namespace.tenant, request.document_id))
        if found is None:
            return cache_pb2.DescribeDocumentResponse()
        return cache_pb2.DescribeDocumentResponse(document=cache_pb2.DocumentDescription(registered=found))

    async def ListDocuments(  # noqa: N802
        self,
        request: cache_pb2.ListDocumentsRequest,
        context: grpc.aio.ServicerContext[cache_pb2.ListDocumentsRequest, cache_pb2.ListDocumentsResponse],
    ) -> cache_pb2.ListDocumentsResponse:
        own = [each for (tenant, _), each in self.documents.items() if tenant == request.namespace.tenant]
        return cache_pb2.ListDocumentsResponse(
            documents=[cache_pb2.DocumentDescription(registered=each) for each in own]
        )

    def publish(self, key: bytes) -> None:
        """What a worker's Publish does."""
        self.resident.add(key)
        self.owners.pop(key, None)

    @staticmethod
    def key_of(tenant: str, salt: str, kind: int, content_hash: bytes) -> bytes:
        return blake3(f"{tenant}\0{salt}\0{kind}\0".encode() + content_hash).digest()

    def _new_lease(self) -> str:
        self.num_leases += 1
        lease_id = f"lease-{self.num_leases}"
        self.leases.add(lease_id)
        return lease_id

    def _plan(
        self, entry: cache_pb2.PlanEntry, namespace: cache_pb2.Namespace, lease_id: str
    ) -> cache_pb2.PlannedEntry:
        key = self.key_of(namespace.tenant, namespace.salt, entry.kind, entry.content_hash)
        if key in self.resident:
            holder = cache_pb2.Holder(worker_id="stub", address="", tier="host")
            return cache_pb2.PlannedEntry(outcome=cache_pb2.PLAN_OUTCOME_HIT, key=key, holders=[holder])
        if self.owners.setdefault(key, lease_id) == lease_id:
            fence = len(self.plans) if self.forgets_tickets else 1
            ticket = cache_pb2.Ticket(ticket_id=f"{lease_id}:{key.hex()[:8]}", fence=fence)
            return cache_pb2.PlannedEntry(outcome=cache_pb2.PLAN_OUTCOME_COLD, key=key, ticket=ticket)
        return cache_pb2.PlannedEntry(
            outcome=cache_pb2.PLAN_OUTCOME_PENDING, key=key, owner_expires_in_seconds=self.owner_expires_in_seconds
        )
