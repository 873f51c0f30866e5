"""gRPC clients of the cache service and of a worker. Every call carries a deadline and the request's id."""

from collections.abc import AsyncGenerator, Sequence

import grpc
from hypic.v1 import cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc

from services.common.errors import InternalError, error_from_status
from services.common.rpc import request_metadata
from services.common.telemetry import new_request_id
from services.router.adapters import messages
from services.router.adapters.plan_stream import PlanStream
from services.router.adapters.releases import GatheredReleases
from services.router.domain.ports import (
    CaptureBatch,
    CaptureResult,
    GenerateEvent,
    GenerateOrder,
    PlanAnswer,
    PlanQuery,
)

__all__ = ["Description", "GrpcDirectory", "GrpcWorker"]


class GrpcDirectory:
    """The cache service behind a channel; implements `Directory`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cache_pb2_grpc.CacheServiceStub(channel)
        self._plans = PlanStream(self._stub)
        self._releases = GatheredReleases(self._stub)

    async def plan(self, query: PlanQuery, timeout_seconds: float) -> PlanAnswer:
        """See `Directory`."""
        response = await self._plans.plan(messages.plan_request(query), timeout_seconds)
        try:
            return messages.plan_answer(query, response)
        except (KeyError, ValueError) as error:
            raise InternalError(f"the cache service answered what was not asked: {error}") from error

    async def renew(self, lease_id: str, lease_seconds: float, timeout_seconds: float) -> None:
        """See `Directory`."""
        request = cache_pb2.RenewRequest(lease_id=lease_id, lease_seconds=lease_seconds)
        try:
            await self._stub.Renew(request, timeout=timeout_seconds, metadata=request_metadata())
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error

    async def release(self, lease_id: str, timeout_seconds: float) -> None:
        """See `Directory`."""
        await self._releases.release(lease_id, timeout_seconds)


class Description:
    """A worker's answer to `Describe`: its information and the bytes of its tokenizer."""

    def __init__(self, info: worker_pb2.WorkerInfo, tokenizer_json: bytes) -> None:
        self.info = messages.model_info(info)
        self.tokenizer_json = tokenizer_json


class GrpcWorker:
    """A worker behind a channel; implements `DroppingWorker`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)

    async def describe(self, timeout_seconds: float) -> Description:
        """What the worker serves.

        Raises:
            HypicError: it cannot be reached in time, or sends no information.
        """
        call = self._stub.Describe(worker_pb2.DescribeRequest(), timeout=timeout_seconds)
        info: worker_pb2.WorkerInfo | None = None
        tokenizer = bytearray()
        try:
            async for message in call:
                if message.HasField("info"):
                    info = message.info
                else:
                    tokenizer += message.tokenizer_chunk
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        if info is None:
            raise InternalError("the worker describes itself without information")
        return Description(info, bytes(tokenizer))

    async def capture(self, batch: CaptureBatch, timeout_seconds: float) -> AsyncGenerator[CaptureResult]:
        """See `Worker`."""
        request = messages.capture_request(new_request_id(), batch)
        call = self._stub.Capture(request, timeout=timeout_seconds, metadata=request_metadata())
        try:
            async for event in call:
                yield messages.capture_result(event)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        finally:
            call.cancel()

    async def drop(self, keys: Sequence[bytes], timeout_seconds: float) -> int:
        """See `DroppingWorker`."""
        request = worker_pb2.DropRequest(keys=keys)
        try:
            response = await self._stub.Drop(request, timeout=timeout_seconds, metadata=request_metadata())
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        return int(response.num_dropped)

    async def generate(self, order: GenerateOrder, timeout_seconds: float) -> AsyncGenerator[GenerateEvent]:
        """See `Worker`."""
        request = messages.generate_request(order)
        call = self._stub.Generate(request, timeout=timeout_seconds, metadata=request_metadata())
        try:
            async for event in call:
                yield _known_event(event)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        finally:
            call.cancel()


def _known_event(event: worker_pb2.GenerateEvent) -> GenerateEvent:
    try:
        return messages.generate_event(event)
    except KeyError as error:
        raise InternalError(f"the worker sent an unknown value {error}") from error
