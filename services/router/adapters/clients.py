"""gRPC clients of the cache service and of a worker. Every call carries a deadline and the request's id."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import grpc
from hypic.v1 import cache_pb2, cache_pb2_grpc, worker_pb2, worker_pb2_grpc

from services.common.errors import InternalError, UnavailableError, error_from_status
from services.common.rpc import request_metadata
from services.common.telemetry import new_request_id
from services.router.adapters import messages
from services.router.adapters.calibration_message import calibration
from services.router.adapters.generate_stream import GenerateStream
from services.router.adapters.plan_stream import PlanStream
from services.router.adapters.releases import GatheredReleases
from services.router.domain.plan import Ticket
from services.router.domain.ports import (
    CaptureBatch,
    CaptureResult,
    GenerateEvent,
    GenerateOrder,
    HoldEvent,
    PlanAnswer,
    PlanQuery,
)
from services.router.domain.store import TierUsage
from services.router.domain.workers import WorkerSpeeds

__all__ = ["Description", "GrpcDirectory", "GrpcWorker", "Report"]

Event = TypeVar("Event")


class GrpcDirectory:
    """The cache service behind a channel; implements `Directory`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = cache_pb2_grpc.CacheServiceStub(channel)
        self._releases = GatheredReleases(self._stub)
        self._plans = PlanStream(self._stub, self._releases.release_late)

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
    """A worker's answer to `Describe`: which one it is, what it does, its model with the bytes of the tokenizer, and its card."""

    def __init__(self, info: worker_pb2.WorkerInfo, tokenizer_json: bytes) -> None:
        self.worker_id = info.worker_id
        self.roles = messages.roles(info)
        self.moves_states = info.moves_states
        self.info = messages.model_info(info)
        self.calibration = calibration(info)
        self.tokenizer_json = tokenizer_json


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's answer to `Report`."""

    speeds: WorkerSpeeds
    capture_tokens_waiting: int
    num_running: int
    num_waiting: int
    is_draining: bool
    tiers: tuple[TierUsage, ...]

    @property
    def num_requests(self) -> int:
        """Whatever is there."""
        return self.num_running + self.num_waiting


class GrpcWorker:
    """A worker behind a channel; implements `Worker`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._generations = GenerateStream(self._stub)
        # Streams under way, which `abort` ends.
        self._streams: set[grpc.aio.UnaryStreamCall[Any, Any]] = set()
        self._aborted: dict[grpc.aio.UnaryStreamCall[Any, Any], str] = {}

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

    async def report(self, timeout_seconds: float) -> Report:
        """How the worker is now.

        Raises:
            HypicError: it does not answer in time.
        """
        try:
            answer = await self._stub.Report(worker_pb2.ReportRequest(), timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        load = answer.load
        return Report(
            messages.worker_speeds(answer.speeds),
            load.capture_tokens_waiting,
            load.num_requests_running,
            load.num_requests_waiting,
            answer.draining,
            tuple(TierUsage(own.tier, own.num_states, own.used_bytes, own.capacity_bytes) for own in answer.tiers),
        )

    def abort(self, reason: str) -> None:
        """End every stream and reply under way with an `UnavailableError`."""
        self._generations.fail_all(reason)
        for stream in self._streams:
            self._aborted[stream] = reason
            stream.cancel()

    async def capture(self, batch: CaptureBatch, timeout_seconds: float) -> AsyncGenerator[CaptureResult]:
        """See `Worker`."""
        request = messages.capture_request(new_request_id(), batch)
        call = self._stub.Capture(request, timeout=timeout_seconds, metadata=request_metadata())
        async with aclosing(self._events(call)) as events:
            async for event in events:
                yield messages.capture_result(event)

    async def keep(self, held_key: bytes, key: bytes, ticket: Ticket, timeout_seconds: float) -> str:
        """See `Worker`."""
        request = messages.keep_request(held_key, key, ticket)
        try:
            response = await self._stub.Keep(request, timeout=timeout_seconds, metadata=request_metadata())
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        return str(response.reason)

    async def drop(self, keys: Sequence[bytes], timeout_seconds: float) -> int:
        """See `Worker`."""
        request = worker_pb2.DropRequest(keys=keys)
        try:
            response = await self._stub.Drop(request, timeout=timeout_seconds, metadata=request_metadata())
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        return int(response.num_dropped)

    async def generate(self, order: GenerateOrder, timeout_seconds: float) -> AsyncGenerator[GenerateEvent]:
        """See `Worker`."""
        call = self._generations.begin(partial(messages.write_generate_request, order), timeout_seconds)
        try:
            while not call.has_ended:
                yield _known(messages.generate_event, await call.next())
        finally:
            call.leave()

    async def hold(self, order: GenerateOrder, timeout_seconds: float) -> AsyncGenerator[HoldEvent]:
        """See `Worker`."""
        call = self._generations.begin(partial(messages.write_hold_request, order), timeout_seconds)
        try:
            while not call.has_ended:
                yield _known(messages.hold_event, await call.next())
        finally:
            call.leave()

    async def _events(self, call: "grpc.aio.UnaryStreamCall[Any, Event]") -> AsyncGenerator[Event]:
        """A stream's messages; the call ends with this generator."""
        self._streams.add(call)
        try:
            # The library's generator, left before its end, holds call and messages until memory is searched for cycles.
            async with aclosing(cast("AsyncGenerator[Event]", aiter(call))) as received:
                async for event in received:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise error_from_status(error) from error
        except asyncio.CancelledError:
            # Of the call by `abort`, or of the task that waits for it.
            if (reason := self._aborted.get(call)) is None:
                raise
            raise UnavailableError(reason) from None
        finally:
            self._streams.discard(call)
            self._aborted.pop(call, None)
            call.cancel()


def _known(read: Callable[[worker_pb2.GenerateEvent], Event], event: worker_pb2.GenerateEvent) -> Event:
    try:
        return read(event)
    except (KeyError, ValueError) as error:
        raise InternalError(f"the worker sent an unknown value {error}") from error
