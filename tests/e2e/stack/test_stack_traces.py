"""The spans of one request through router, cache service and workers, as a collector gets them."""

import secrets

import pytest

from tests.e2e.stack.asking import CHAT, body, document
from tests.e2e.stack.observed import Observed
from tests.e2e.stack.otlp import SeenSpan
from tests.e2e.stack.served import wait_until

PLAN, PUBLISH, PUBLISH_COPY = (f"hypic.v1.CacheService/{name}" for name in ("Plan", "Publish", "PublishCopy"))
GENERATE, CAPTURE, FETCH = (f"hypic.v1.WorkerService/{name}" for name in ("Generate", "Capture", "Fetch"))


@pytest.fixture(scope="module")
def traced(observed: Observed) -> tuple[Observed, list[SeenSpan], str, dict[str, object]]:
    """A cold request within a trace of the client's: its spans, the client's span id, and the reply."""
    trace_id, client_span = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{client_span}-01", "x-request-id": f"traced-{trace_id}"}
    caller = observed.clients["acme"]
    request = body(caller, [document(f"traced {trace_id} {number}", 60) for number in range(2)])
    answer = caller.http.post(CHAT, json=request, headers=headers)
    assert answer.status_code == 200

    def names() -> set[str]:
        return {span.name for span in observed.collector.trace(trace_id)}

    wanted = {f"POST {CHAT}", PLAN, GENERATE, CAPTURE, FETCH, PUBLISH, PUBLISH_COPY, "queue", "combine", "decode"}
    wait_until(lambda: wanted <= names(), 60)
    return observed, observed.collector.trace(trace_id), client_span, answer.json()


def test_one_request_is_one_tree(traced: tuple[Observed, list[SeenSpan], str, dict[str, object]]) -> None:
    _, spans, client_span, _ = traced
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    (root,) = (span for span in spans if span.parent_id == client_span)
    assert (root.service, root.name) == ("hypic-router", f"POST {CHAT}")
    for span in spans:
        assert span is root or span.parent_id in by_id, f"{span.name} hangs from nothing"
    parents = {(span.service, span.name): by_id[span.parent_id].name for span in spans if span is not root}
    assert parents["hypic-cache", PLAN] == root.name
    assert parents["hypic-worker", CAPTURE] == root.name
    assert parents["hypic-worker", GENERATE] == root.name
    assert parents["hypic-worker", FETCH] == GENERATE
    assert parents["hypic-cache", PUBLISH] in (CAPTURE, GENERATE)
    assert parents["hypic-cache", PUBLISH_COPY] == GENERATE
    for stage in ("queue", "combine", "decode"):
        assert parents["hypic-worker", stage] == GENERATE


def test_spans_lie_within_what_they_are_part_of(
    traced: tuple[Observed, list[SeenSpan], str, dict[str, object]],
) -> None:
    """All processes share this machine's clock."""
    _, spans, _, _ = traced
    by_name = {span.name: span for span in spans}
    generate = by_name[GENERATE]
    stages = [by_name[name] for name in ("queue", "combine", "decode")]
    assert all(generate.start <= stage.start <= stage.end <= generate.end for stage in stages)
    assert [stage.end for stage in stages[:-1]] == [stage.start for stage in stages[1:]]
    assert by_name[f"POST {CHAT}"].start <= by_name[PLAN].start <= by_name[PLAN].end <= generate.start


def test_the_root_says_what_was_asked_and_reused(
    traced: tuple[Observed, list[SeenSpan], str, dict[str, object]],
) -> None:
    observed, spans, _, reply = traced
    attributes = next(span.attributes for span in spans if span.name == f"POST {CHAT}")
    usage = reply["usage"]
    assert isinstance(usage, dict)
    assert attributes["gen_ai.request.model"] == observed.stack.model
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert attributes["http.response.status_code"] == 200
    combine = next(span.attributes for span in spans if span.name == "combine")
    counts = [combine[f"hypic.{kind}_tokens"] for kind in ("live", "captured", "reused")]
    assert sum(counts) == usage["prompt_tokens"]


def test_heartbeats_and_scrapes_are_in_no_trace(observed: Observed) -> None:
    observed.stack.router_metric("hypic_num_requests_running")
    names = {span.name for span in observed.collector.spans}
    assert not [name for name in names if "Heartbeat" in name or "Report" in name or "metrics" in name]


def test_spans_hold_no_text(observed: Observed) -> None:
    told = " ".join(f"{span.name} {span.attributes}" for span in observed.collector.spans)
    assert "gen_ai.usage.input_tokens" in told
    assert [words for words in observed.secret_words if words in told] == []


def test_logs_carry_the_ids_of_request_and_trace(observed: Observed) -> None:
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01", "x-request-id": f"logged-{trace_id}"}
    caller = observed.clients["acme"]
    request = body(caller, [], some_field_of_nobody=1)
    assert caller.http.post(CHAT, json=request, headers=headers).headers["x-request-id"] == headers["x-request-id"]
    (line,) = (line for line in observed.log.read_text().splitlines() if f"trace_id={trace_id}" in line)
    assert "fields_ignored" in line
    assert f"request_id={headers['x-request-id']}" in line
