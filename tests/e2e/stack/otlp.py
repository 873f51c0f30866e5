"""A collector of traces that keeps what it is sent: OTLP over gRPC, in a thread of its own."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

__all__ = ["Collector", "SeenSpan"]


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """One span. Ids as hexadecimal digits; times in nanoseconds since the Unix epoch."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens from entering its context to leaving it."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call] # generated
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802, ANN401 # the protocol's
        """See OTLP's trace service."""
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_seen(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[SeenSpan]:
        """The spans of one trace that have come."""
        return [span for span in list(self.spans) if span.trace_id == trace_id]


def _seen(service: str, span: Any) -> SeenSpan:  # noqa: ANN401 # a message without types
    return SeenSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:  # noqa: ANN401 # messages without types
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
