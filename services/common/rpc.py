"""gRPC plumbing: channels and servers with one set of options, request ids in metadata, errors as status codes."""

# grpc's handler type is generic in its stubs only.
from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common.errors import HypicError
from services.common.telemetry import current_request_id, get_logger, set_request_id
from services.common.tls import Identity, TlsFiles, server_credentials
from services.common.tracing import TRACE_HEADER, serve_rpc, trace_parent

__all__ = [
    "CHUNK_BYTES",
    "LIVENESS",
    "READINESS",
    "HealthSwitch",
    "cache_channel",
    "create_channel",
    "create_server",
    "request_metadata",
    "serve_health",
    "worker_channel",
]

# Streams of blobs move this many bytes a message; measured faster than smaller or larger ones.
CHUNK_BYTES = 1 << 20
LIVENESS = "liveness"
READINESS = "readiness"

_REQUEST_ID = "x-request-id"
_BOTH_OPTIONS = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # What several requests ask, or several replies say, goes in one message; what one may ask is bounded where it comes in.
    ("grpc.max_receive_message_length", -1),
]
_SERVER_OPTIONS = [
    *_BOTH_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),
]
# The default back-off of a channel grows to two minutes; a restarted peer is wanted back sooner.
_CHANNEL_OPTIONS = [
    *_BOTH_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A restarted pod keeps its name and has another address; by default a name is asked again after half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
]
# Targets that stand for several addresses, in gRPC's own notation; calls go to all of them in turn.
_SPREAD = ("dns:///", "ipv4:", "ipv6:")
_SPREAD_OPTIONS = [*_CHANNEL_OPTIONS, ("grpc.lb_policy_name", "round_robin")]


def create_channel(address: str, security: tuple[grpc.ChannelCredentials, str] | None = None) -> grpc.aio.Channel:
    """A channel to one peer. One a peer and process. security: credentials, and the name that the peer's certificate carries;
    plain text without.

    `host:port` is one peer; `dns:///name:port` all addresses of the name (a headless service), over which calls are spread.
    """
    options = _SPREAD_OPTIONS if address.startswith(_SPREAD) else _CHANNEL_OPTIONS
    if security is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials, name = security
    return grpc.aio.secure_channel(address, credentials, options=[*options, ("grpc.ssl_target_name_override", name)])


def cache_channel(address: str, identity: Identity | None) -> grpc.aio.Channel:
    """A channel to the cache service."""
    return create_channel(address, None if identity is None else identity.cache_credentials())


def worker_channel(address: str, identity: Identity | None) -> grpc.aio.Channel:
    """A channel to a worker."""
    return create_channel(address, None if identity is None else identity.worker_credentials())


def request_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata that hands the running request's id, and its place in its trace, to the peer; pass it with every call."""
    ids = ((_REQUEST_ID, current_request_id()), (TRACE_HEADER, trace_parent()))
    return tuple((name, value) for name, value in ids if value)


class HealthSwitch:
    """The gRPC health service with `liveness` and `readiness` apart, as Kubernetes probes want it."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()

    async def set_ready(self, ready: bool) -> None:
        """Readiness (and the unnamed overall service) follow `ready`; liveness always serves."""
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.servicer.set(LIVENESS, serving)
        await self.servicer.set(READINESS, status)
        await self.servicer.set("", status)


Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Request, Response]


class _Boundary(grpc.aio.ServerInterceptor):
    """Binds the caller's request id, and turns our errors into status codes."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Response] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Response] | None:
        handler: Any = await continuation(handler_call_details)
        # The library's health service writes its streams in another style than ours, and needs no guard.
        is_health = str(handler_call_details.method).startswith("/grpc.health.")
        if handler is None or handler.request_streaming or is_health:
            return cast("grpc.RpcMethodHandler[Request, Response] | None", handler)
        caller = _caller(handler_call_details)
        wrapped: Any
        if handler.response_streaming:
            wrapped = grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream, caller),
                handler.request_deserializer,
                handler.response_serializer,
            )
        else:
            wrapped = grpc.unary_unary_rpc_method_handler(
                _guard_unary(handler.unary_unary, caller),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return cast("grpc.RpcMethodHandler[Request, Response]", wrapped)


@dataclass(frozen=True, slots=True)
class _Caller:
    """What a call's metadata says of the request behind it. trace_parent: empty outside a trace."""

    method: str
    request_id: str
    trace_parent: str

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Logs, calls and spans of the running task belong to the caller's request."""
        set_request_id(self.request_id)
        with serve_rpc(self.method, self.trace_parent):
            yield


def _caller(details: grpc.HandlerCallDetails) -> _Caller:
    metadata = dict(details.invocation_metadata or ())
    return _Caller(str(details.method), str(metadata.get(_REQUEST_ID, "")), str(metadata.get(TRACE_HEADER, "")))


def _guard_unary(
    method: Callable[[Request, Context[Request, Response]], Awaitable[Response]], caller: _Caller
) -> Callable[[Request, Context[Request, Response]], Awaitable[Response]]:
    async def guarded(request: Request, context: Context[Request, Response]) -> Response:
        with caller.bound():
            try:
                return await method(request, context)
            except HypicError as error:
                await context.abort(error.status, str(error))
            except Exception:
                get_logger().exception("rpc_failed")
                raise

    return guarded


def _guard_stream(
    method: Callable[[Request, Context[Request, Response]], AsyncGenerator[Response]], caller: _Caller
) -> Callable[[Request, Context[Request, Response]], AsyncGenerator[Response]]:
    async def guarded(request: Request, context: Context[Request, Response]) -> AsyncGenerator[Response]:
        with caller.bound():
            try:
                async with aclosing(method(request, context)) as messages:
                    async for message in messages:
                        yield message
            except HypicError as error:
                await context.abort(error.status, str(error))
            except Exception:
                get_logger().exception("rpc_failed")
                raise

    return guarded


async def create_server(
    register: Sequence[Callable[[grpc.aio.Server], None]],
    address: str,
    health_switch: HealthSwitch,
    tls: TlsFiles | None = None,
) -> tuple[grpc.aio.Server, int]:
    """A started server, and the port that it listens on (useful with port 0). tls: plain text without.

    Raises:
        RuntimeError: the address cannot be bound.
    """
    server = grpc.aio.server(interceptors=(_Boundary(),), options=_SERVER_OPTIONS)
    for add_servicer in register:
        add_servicer(server)
    health_pb2_grpc.add_HealthServicer_to_server(health_switch.servicer, server)
    port = (
        server.add_insecure_port(address) if tls is None else server.add_secure_port(address, server_credentials(tls))
    )
    await health_switch.set_ready(False)
    await server.start()
    return server, port


async def serve_health(address: str, health_switch: HealthSwitch) -> grpc.aio.Server | None:
    """A started server of the health service alone, in plain text: probes of an orchestrator have no certificate. None
    without an address.

    Raises:
        RuntimeError: the address cannot be bound.
    """
    if not address:
        return None
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health_switch.servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server
