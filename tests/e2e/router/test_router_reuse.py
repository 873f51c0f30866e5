import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypic.v1 import worker_pb2

from services.router.settings import RouterSettings
from tests.router_stack import RouterStack, wait_until
from tests.stub_worker import MODEL_NAME, SEAM_WINDOW

Json = dict[str, Any]

FIRST = {"id": "one", "title": "One", "text": "The river city has a long history of trade and bridges. " * 4}
SECOND = {"id": "two", "text": "Another document tells about the mountains, the snow and the goats. " * 4}
SYSTEM = {"role": "system", "content": "Answer from the documents, in one short sentence."}


@pytest.fixture(params=[True, False], ids=["one_sweep", "captures_ahead"])
def stack(request: pytest.FixtureRequest) -> Iterator[RouterStack]:
    """With a worker that captures as it combines, and with one that has captures apart."""
    with RouterStack(can_capture=request.param) as stack:
        yield stack
        wait_until(lambda: not stack.cache.leases)
        assert stack.worker.num_running == 0


def ask(
    stack: RouterStack, documents: list[dict[str, str]], question: str = "What?", salt: str = "", **options: object
) -> Json:
    body = {
        "model": MODEL_NAME,
        "messages": [SYSTEM, {"role": "user", "content": question}],
        "documents": documents,
        "hypic": {"explain": True} | options,
    }
    response = stack.http.post("/v1/chat/completions", json=body | ({"cache_salt": salt} if salt else {}))
    assert response.status_code == 200, response.text
    reply: Json = response.json()
    parts = reply["hypic"]["parts"]
    for part in parts:
        assert part["tokens"] == part["live_tokens"] + part["captured_tokens"] + part["reused_tokens"]
        assert part["reason"] or part["live_tokens"] <= SEAM_WINDOW
    assert sum(part["tokens"] for part in parts) == reply["usage"]["prompt_tokens"]
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == sum(part["reused_tokens"] for part in parts)
    return reply


def documents_of(reply: Json) -> list[tuple[str, str, str | None]]:
    parts = reply["hypic"]["parts"]
    return [(part["planned"], part["served"], part["reason"]) for part in parts if part["document_id"]]


def prompt_ids(request: worker_pb2.GenerateRequest) -> list[int]:
    return [token_id for part in request.parts for token_id in part.token_ids]


def test_documents_are_reused_in_any_order(stack: RouterStack) -> None:
    cold = ask(stack, [FIRST, SECOND])
    assert documents_of(cold) == [("cold", "cold", "first_use")] * 2
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(stack.worker.begun) == 2
    for capture in stack.worker.captures:
        lengths = [len(segment.token_ids) for segment in capture.segments]
        assert lengths == sorted(lengths, reverse=True)
        assert not capture.background
    assert bool(stack.worker.captures) != stack.worker.can_capture
    warm = ask(stack, [SECOND, FIRST], "And now?")
    assert documents_of(warm) == [("hit", "hit", None)] * 2
    kinds = [(part["kind"], part["served"]) for part in warm["hypic"]["parts"]]
    assert kinds == [
        ("prefix", "prefix"), ("live", "live"), ("segment", "hit"), ("segment", "hit"), ("live", "live"), ("live", "live"),
    ]  # fmt: skip
    assert len(stack.worker.begun) == 2


def test_one_changed_document_alone_is_cold(stack: RouterStack) -> None:
    ask(stack, [FIRST, SECOND])
    changed = ask(stack, [FIRST, SECOND | {"text": SECOND["text"] + "New."}])
    assert [served for _, served, _ in documents_of(changed)] == ["hit", "cold"]


def test_every_mode_runs_the_same_ids(stack: RouterStack) -> None:
    for reuse in ("off", "exact", "compose", "compose"):
        ask(stack, [FIRST, SECOND], reuse=reuse)
    first, *others = map(prompt_ids, stack.worker.requests)
    assert all(ids == first for ids in others)


def test_off_asks_and_stores_nothing(stack: RouterStack) -> None:
    reply = ask(stack, [FIRST], reuse="off")
    assert {part["reason"] for part in reply["hypic"]["parts"]} == {"reuse_off"}
    assert not stack.cache.plans
    assert not stack.worker.requests[0].snapshots


def test_exact_reuses_whole_prefixes_only(stack: RouterStack) -> None:
    cold = ask(stack, [FIRST], reuse="exact")
    assert [reason for _, _, reason in documents_of(cold)] == ["reuse_exact"]
    warm = ask(stack, [FIRST], reuse="exact")
    assert [served for _, served, _ in documents_of(warm)] == ["prefix"]
    other = ask(stack, [SECOND], reuse="exact")
    assert [served for _, served, _ in documents_of(other)] == ["live"]
    assert other["hypic"]["parts"][0]["served"] == "prefix"


def test_salts_share_nothing(stack: RouterStack) -> None:
    ask(stack, [FIRST], salt="mine")
    assert [served for _, served, _ in documents_of(ask(stack, [FIRST], salt="yours"))] == ["cold"]
    assert [served for _, served, _ in documents_of(ask(stack, [FIRST]))] == ["cold"]
    assert [served for _, served, _ in documents_of(ask(stack, [FIRST], salt="mine"))] == ["hit"]


def test_the_same_document_twice_is_captured_once(stack: RouterStack) -> None:
    reply = ask(stack, [FIRST, FIRST])
    assert [served for _, served, _ in documents_of(reply)] == ["cold", "hit"]
    assert len(stack.worker.begun) == 1


def test_cold_live_answers_first_and_captures_behind(stack: RouterStack) -> None:
    reply = ask(stack, [FIRST], cold="live")
    assert documents_of(reply) == [("cold", "live", "first_use")]
    wait_until(lambda: not stack.cache.leases)
    assert [capture.background for capture in stack.worker.captures] == [True]
    assert [served for _, served, _ in documents_of(ask(stack, [FIRST], cold="live"))] == ["hit"]


def test_cold_auto_does_what_it_says_and_says_why(stack: RouterStack) -> None:
    reply = ask(stack, [FIRST], cold="auto")
    choice = reply["hypic"]["cold_choice"]
    assert reply["hypic"]["cold"] == "auto"
    assert (choice["chosen"] == "live") == (choice["live_seconds"] <= choice["parallel_seconds"])
    assert choice["reason"] == f"{choice['chosen']}_costs_less"
    served = "live" if choice["chosen"] == "live" else "cold"
    assert documents_of(reply) == [("cold", served, "first_use")]
    wait_until(lambda: not stack.cache.leases)
    warm = ask(stack, [FIRST], cold="auto")
    assert documents_of(warm) == [("hit", "hit", None)]
    assert warm["hypic"]["cold_choice"] is None


def test_a_refresh_is_ordered_told_and_counted(stack: RouterStack) -> None:
    ask(stack, [FIRST, SECOND])
    reply = ask(stack, [FIRST, SECOND], refresh=1)
    assert stack.worker.requests[-1].refresh.blocks == 1
    parts = [part for part in reply["hypic"]["parts"] if part["document_id"]]
    assert [(part["served"], part["refreshed_tokens"], part["reason"]) for part in parts] == [
        ("hit", 16, "refreshed")
    ] * 2
    assert [part["live_tokens"] for part in parts] == [SEAM_WINDOW + 16] * 2
    assert (reply["hypic"]["refresh"], reply["hypic"]["ttft_budget_seconds"]) == (1, None)
    assert "hypic_refreshed_tokens_total 32.0" in stack.http.get("/metrics").text
    auto = ask(stack, [FIRST, SECOND], refresh="auto", ttft_budget_seconds=0.25)
    assert stack.worker.requests[-1].refresh.budget_seconds == 0.25
    assert (auto["hypic"]["refresh"], auto["hypic"]["ttft_budget_seconds"]) == ("auto", 0.25)
    ask(stack, [FIRST], refresh=0)
    assert not stack.worker.requests[-1].HasField("refresh")


def test_the_deployment_refreshes_where_a_request_does_not_say() -> None:
    with RouterStack(RouterSettings(refresh="auto", ttft_budget_seconds=0.5)) as stack:
        ask(stack, [FIRST])
        assert stack.worker.requests[-1].refresh.budget_seconds == 0.5
        ask(stack, [FIRST], refresh=3)
        assert stack.worker.requests[-1].refresh.blocks == 3


def test_the_deployment_says_what_becomes_of_cold_segments() -> None:
    with RouterStack(RouterSettings(cold="live")) as stack:
        assert documents_of(ask(stack, [FIRST])) == [("cold", "live", "first_use")]
        assert documents_of(ask(stack, [SECOND], cold="parallel")) == [("cold", "cold", "first_use")]


def test_a_cache_that_is_down_costs_reuse_and_nothing_else(stack: RouterStack) -> None:
    stack.cache.is_down = True
    assert documents_of(ask(stack, [FIRST])) == [("live", "live", "cache_unavailable")]
    assert 'hypic_fallbacks_total{reason="cache_unavailable"}' in stack.http.get("/metrics").text
    stack.cache.is_down = False
    assert [served for _, served, _ in documents_of(ask(stack, [FIRST]))] == ["cold"]


def test_failed_captures_become_live(stack: RouterStack) -> None:
    stack.worker.failing_captures = True
    assert documents_of(ask(stack, [FIRST])) == [("cold", "live", "capture_failed")]
    # Its ticket goes behind the reply.
    wait_until(lambda: not stack.cache.leases)
    stack.worker.failing_captures, stack.worker.broken_captures = False, True
    assert documents_of(ask(stack, [FIRST])) == [("cold", "live", "capture_failed")]


def test_a_state_that_the_worker_lost_becomes_live(stack: RouterStack) -> None:
    ask(stack, [FIRST])
    stack.worker.drops_states = True
    reply = ask(stack, [FIRST])
    assert documents_of(reply) == [("hit", "live", "state_dropped")]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_requests_that_miss_together_capture_once(stack: RouterStack) -> None:
    stack.worker.capture_delay_seconds = 0.3
    gate = threading.Barrier(4)

    def run() -> Json:
        gate.wait(10)
        return ask(stack, [FIRST])

    with ThreadPoolExecutor(4) as pool:
        replies = [future.result(20) for future in [pool.submit(run) for _ in range(4)]]
    rows = sorted(documents_of(reply)[0][:2] for reply in replies)
    assert rows == [("cold", "cold"), *[("pending", "hit")] * 3]
    assert len(stack.worker.begun) == 1


def test_a_pending_part_is_not_waited_for_longer_than_twice_the_estimate(stack: RouterStack) -> None:
    stack.worker.capture_delay_seconds = 1.0
    stack.cache.owner_expires_in_seconds = 0.05
    with ThreadPoolExecutor(1) as pool:
        owner = pool.submit(ask, stack, [FIRST])
        wait_until(lambda: bool(stack.worker.begun))
        assert documents_of(ask(stack, [FIRST])) == [("pending", "live", "computed_elsewhere")]
        assert [served for _, served, _ in documents_of(owner.result(20))] == ["cold"]


def test_nothing_of_a_request_waits_while_it_waits_for_others(stack: RouterStack) -> None:
    """What it owns itself is captured meanwhile, whoever combines: others may wait for it in turn."""
    stack.worker.capture_delay_seconds = 0.4
    with ThreadPoolExecutor(1) as pool:
        owner = pool.submit(ask, stack, [FIRST])
        wait_until(lambda: bool(stack.worker.begun))
        reply = ask(stack, [FIRST, SECOND])
        owner.result(20)
    assert [row[:2] for row in documents_of(reply)] == [("pending", "hit"), ("cold", "cold")]
    assert len(stack.worker.captures[-1].segments) == 1
    assert len(stack.worker.begun) == 2


def test_a_dead_owner_is_replaced(stack: RouterStack) -> None:
    stack.worker.capture_delay_seconds = 0.4
    stack.worker.failing_captures = True
    with ThreadPoolExecutor(1) as pool:
        owner = pool.submit(ask, stack, [FIRST])
        wait_until(lambda: bool(stack.worker.begun))
        second = pool.submit(ask, stack, [FIRST])
        owner.result(20)
        stack.worker.failing_captures = False
        assert [served for _, served, _ in documents_of(second.result(20))] == ["cold"]


def test_conversation_turns_reuse_their_history(stack: RouterStack) -> None:
    turns: list[dict[str, str]] = [SYSTEM, {"role": "user", "content": "What is the river?"}]
    body = {"model": MODEL_NAME, "hypic": {"explain": True}}
    first = stack.http.post("/v1/chat/completions", json=body | {"messages": turns}).json()
    turns += [{"role": "assistant", "content": "It is long."}, {"role": "user", "content": "And the bridge?"}]
    second = stack.http.post("/v1/chat/completions", json=body | {"messages": turns}).json()
    reused = [part["served"] for part in second["hypic"]["parts"]]
    assert reused[:2] == ["prefix", "prefix"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == sum(part["tokens"] for part in first["hypic"]["parts"][:-1])
