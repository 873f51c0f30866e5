"""OpenTelemetry spans along one request: one tree through router, cache service and workers.

Context travels as W3C `traceparent`: in HTTP headers, in gRPC metadata, and in the messages of streams that many requests share.
Without `configure_tracing` spans are not recorded, and cost next to nothing.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from services.common.telemetry import get_logger

__all__ = [
    "TRACE_HEADER",
    "add_span",
    "configure_tracing",
    "current_span",
    "serve_rpc",
    "trace_parent",
]

TRACE_HEADER = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()
# An export that takes longer is given up; a process that ends waits no longer for its last one.
_EXPORT_SECONDS = 3


class _LogHandler(logging.Handler):
    """The library's own complaints as events of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        get_logger().warning("tracing", reason=record.getMessage())


def configure_tracing(service: str, variable: str, endpoint: str) -> None:
    """Export this process's spans over OTLP and gRPC to an endpoint, `http://host:4317`; an empty one leaves tracing off.

    A collector that does not answer costs spans, never a request. `variable` is the setting's name. Ends the process with
    status 2 where the libraries are not installed.
    """
    if not endpoint:
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        sys.stderr.write(f"hypic: settings: {variable}: tracing is not installed; pip install 'hypic[tracing]'\n")
        raise SystemExit(2) from None
    library = logging.getLogger("opentelemetry")
    library.addHandler(_LogHandler())
    library.propagate = False
    provider = TracerProvider(resource=Resource.create({"service.name": f"hypic-{service}"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)))
    trace.set_tracer_provider(provider)


def current_span() -> Span:
    """That of the running task; one that records nothing where there is none."""
    return trace.get_current_span()


def trace_parent() -> str:
    """The running task's place in its trace, for a peer; empty outside a trace."""
    if trace.get_current_span() is trace.INVALID_SPAN:
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get(TRACE_HEADER, "")


@contextmanager
def serve_rpc(method: str, parent: str) -> Iterator[None]:
    """The span of a call from another service; none where the caller is in no trace, as heartbeats are."""
    if not parent:
        yield
        return
    context = _PROPAGATOR.extract({TRACE_HEADER: parent})
    with trace.get_tracer("hypic").start_as_current_span(method.lstrip("/"), context, SpanKind.SERVER):
        yield


def add_span(name: str, start_ns: int, end_ns: int, attributes: Mapping[str, AttributeValue] | None = None) -> None:
    """A stage of the current span that has ended, in nanoseconds since the Unix epoch; nothing outside a trace."""
    if current_span().is_recording():
        span = trace.get_tracer("hypic").start_span(name, start_time=start_ns, attributes=attributes)
        span.end(end_ns)
