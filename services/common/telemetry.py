"""Structured logs that carry the ids of request and trace, and the metrics endpoint."""

import contextvars
import logging
import secrets
import sys
import warnings
from typing import Literal, TextIO

import structlog
from opentelemetry import trace
from prometheus_client import CollectorRegistry, start_http_server

__all__ = ["configure_logging", "current_request_id", "get_logger", "new_request_id", "serve_metrics", "set_request_id"]

_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def new_request_id() -> str:
    """128 random bits as 32 hexadecimal digits."""
    return secrets.token_hex(16)


def set_request_id(request_id: str) -> None:
    """Bind the id to the running task: its logs and its calls to other services carry it."""
    _request_id.set(request_id)


def current_request_id() -> str:
    """The id bound to the running task; empty outside a request."""
    return _request_id.get()


def _add_ids(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    request_id = _request_id.get()
    if request_id:
        event.setdefault("request_id", request_id)
    trace_id = trace.get_current_span().get_span_context().trace_id
    if trace_id:
        event.setdefault("trace_id", f"{trace_id:032x}")
    return event


def _add_field(name: str, value: str) -> structlog.typing.Processor:
    def add(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault(name, value)
        return event

    return add


def configure_logging(service: str, level: str, log_format: Literal["json", "console"]) -> None:
    """Send this process's logs, and what it warns of, to standard error, one event a line."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=False, pad_event_to=28)
    )
    structlog.configure(
        processors=[
            _add_field("service", service),
            _add_ids,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    warnings.showwarning = _log_warning


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning of a library, or of the model that is loaded, as one event; by itself it would take two lines."""
    get_logger().warning("warning", category=category.__name__, reason=str(message))


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """A logger; events are snake_case names, everything else goes into fields."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> None:
    """Serve `/metrics` of this registry in a thread of its own; port 0 serves nothing."""
    if port:
        start_http_server(port, addr=host, registry=registry)
