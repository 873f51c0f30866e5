"""What a process logs and traces, seen from outside."""

import json
import subprocess
import sys

from services.common.rpc import request_metadata
from services.common.tracing import add_span, current_span, serve_rpc, trace_parent

WARNING_PROCESS = """
import warnings
from services.common.telemetry import configure_logging
configure_logging("worker", "info", "json")
for _ in range(2):
    warnings.warn("config.json: a field is missing", stacklevel=1)
"""


def test_a_warning_is_one_event() -> None:
    """Once for a place in the code, as warnings are."""
    process = subprocess.run([sys.executable, "-c", WARNING_PROCESS], capture_output=True, text=True, check=True)
    (line,) = process.stderr.splitlines()
    event = json.loads(line)
    assert event["event"] == "warning"
    assert event["level"] == "warning"
    assert event["service"] == "worker"
    assert event["category"] == "UserWarning"
    assert event["reason"] == "config.json: a field is missing"


TRACED_PROCESS = """
import sys
{before}
from services.common.telemetry import configure_logging, get_logger
from services.common.tracing import configure_tracing, serve_rpc, trace_parent
configure_logging("cache", "info", "json")
configure_tracing("cache", "HYPIC_CACHE_OTLP_ENDPOINT", "http://127.0.0.1:9")
with serve_rpc("/hypic.v1.CacheService/Publish", "00-{trace}-{span}-01"):
    get_logger().info("served", parent=trace_parent())
"""
TRACE, SPAN = "1" * 32, "2" * 16


def traced_process(before: str = "") -> subprocess.CompletedProcess[str]:
    source = TRACED_PROCESS.format(before=before, trace=TRACE, span=SPAN)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)


def test_a_collector_that_is_away_costs_spans_alone() -> None:
    process = traced_process()
    assert process.returncode == 0, process.stderr
    events = [json.loads(line) for line in process.stderr.splitlines()]
    served = next(event for event in events if event["event"] == "served")
    assert served["trace_id"] == TRACE
    version, trace, span, flags = served["parent"].split("-")
    assert (version, trace, flags) == ("00", TRACE, "01")
    assert span != SPAN
    assert {event["event"] for event in events} == {"served", "tracing"}


def test_tracing_that_is_not_installed_ends_the_start_with_its_remedy() -> None:
    process = traced_process("sys.modules['opentelemetry.sdk.trace'] = None")
    assert process.returncode == 2
    remedy = "pip install 'hypic[tracing]'"
    assert process.stderr == f"hypic: settings: HYPIC_CACHE_OTLP_ENDPOINT: tracing is not installed; {remedy}\n"


def test_without_a_collector_nothing_is_recorded_and_the_callers_place_is_passed_on() -> None:
    assert trace_parent() == ""
    assert request_metadata() == ()
    with serve_rpc("/hypic.v1.CacheService/Publish", f"00-{TRACE}-{SPAN}-01"):
        assert not current_span().is_recording()
        add_span("nothing", 0, 1)
        assert request_metadata() == (("traceparent", f"00-{TRACE}-{SPAN}-01"),)
    with serve_rpc("/hypic.v1.CacheService/Heartbeat", ""):
        assert trace_parent() == ""
    for malformed in ("no place", "00-0-0-01", f"00-{'0' * 32}-{SPAN}-01"):
        with serve_rpc("/hypic.v1.CacheService/Publish", malformed):
            assert trace_parent() == ""
