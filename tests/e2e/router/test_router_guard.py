"""The guard behind a router of stub services: what is looked at again, what comes of it, and that traffic goes first."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypic.v1 import worker_pb2

from services.router.settings import RouterSettings
from tests.router_stack import RouterStack, wait_until
from tests.stub_worker import MODEL_NAME, SPECIAL_TOKENS

Json = dict[str, Any]
TEXT = "The river city has a long history of trade and bridges. " * 4
LAST = 2**31 - 1
SETTINGS = RouterSettings(guard_share=1.0, guard_budgets={"legal": 0.2})


@pytest.fixture
def stack() -> Iterator[RouterStack]:
    with RouterStack(SETTINGS) as running:
        yield running
        wait_until(lambda: not running.cache.leases)
        wait_until(lambda: running.worker.num_running == 0)


def body(question: str = "What?", **options: Any) -> Json:  # noqa: ANN401 # JSON
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": question}]
    documents = [{"id": "one", "title": "One", "text": TEXT}]
    return {"model": MODEL_NAME, "messages": messages, "documents": documents, "hypic": {"explain": True} | options}


def ask(stack: RouterStack, **options: Any) -> Json:  # noqa: ANN401 # JSON
    response = stack.http.post("/v1/chat/completions", json=body(**options))
    assert response.status_code == 200, response.text
    reply: Json = response.json()
    return reply


def quality(stack: RouterStack) -> Json:
    found: Json = stack.http.get("/admin/quality").json()
    return found


def compared(stack: RouterStack) -> int:
    return int(quality(stack)["samples"]["compared"])


def document_reason(reply: Json) -> str | None:
    (reason,) = [part["reason"] for part in reply["hypic"]["parts"] if part["document_id"]]
    assert reason is None or isinstance(reason, str)
    return reason


def test_a_composed_request_is_run_again_composed_and_in_full_behind_its_reply(stack: RouterStack) -> None:
    ask(stack)
    wait_until(lambda: compared(stack) == 1)
    asked, composed, full = stack.worker.requests
    assert not asked.sampling.HasField("logprobs")
    assert asked.priority == 0
    for shadow in (composed, full):
        assert shadow.priority == LAST
        assert (shadow.sampling.temperature, shadow.sampling.max_tokens, shadow.sampling.logprobs) == (0.0, 4, 20)
        assert SPECIAL_TOKENS.index("<|im_end|>") not in shadow.sampling.stop_token_ids
    ids = [[token for part in each.parts for token in part.token_ids] for each in stack.worker.requests]
    assert ids[0] == ids[1] == ids[2]
    assert {part.serving for part in full.parts} == {worker_pb2.PART_SERVING_LIVE}
    assert not full.snapshots
    (tag,) = quality(stack)["tags"]
    assert (tag["tag"], tag["mode"], tag["mean_agreement"]) == ("other", "compose", 1.0)
    assert tag["mean_divergence_nats"] == pytest.approx(0.0, abs=1e-9)


def test_what_composes_nothing_is_not_looked_at(stack: RouterStack) -> None:
    for reuse in ("off", "exact"):
        ask(stack, reuse=reuse)
    ask(stack, cold="live")
    wait_until(lambda: bool(stack.worker.held))
    ask(stack)
    wait_until(lambda: compared(stack) == 1)
    assert sum(quality(stack)["samples"].values()) == 1


def test_a_tag_that_loses_too_much_is_answered_exactly_and_no_other_one_is(stack: RouterStack) -> None:
    stack.worker.composed_reply = "Quite another answer."
    for number in range(1, 40):
        reply = ask(stack, tag="legal")
        if document_reason(reply) == "quality_guard":
            break
        wait_until(lambda number=number: compared(stack) == number)  # type: ignore[misc]
    assert reply["hypic"]["reuse"] == "exact"
    assert reply["choices"][0]["message"]["content"] == stack.worker.reply
    assert stack.http.post("/v1/chat/completions", json=body()).json()["choices"][0]["message"]["content"] == (
        stack.worker.composed_reply
    )
    found = quality(stack)
    (event,) = found["events"]
    assert (event["tag"], event["mode"], event["cause"], event["budget_nats"]) == ("legal", "exact", "divergence", 0.2)
    assert event["num_samples"] < 40
    assert event["mean_divergence_nats"] > 0.2
    assert event["evidence_log10"] >= 6
    assert {each["tag"]: each["mode"] for each in found["tags"]}["legal"] == "exact"
    assert TEXT[:20] not in json.dumps(found)
    metrics = stack.http.get("/metrics").text
    assert f'hypic_guard_exact{{model_name="{MODEL_NAME}",tag="legal"}} 1.0' in metrics
    assert 'hypic_fallbacks_total{reason="quality_guard"}' in metrics
    # It goes on being looked at, so that it can come back.
    before = compared(stack)
    ask(stack, tag="legal")
    wait_until(lambda: compared(stack) > before)


def test_traffic_stops_what_runs_behind_it(stack: RouterStack) -> None:
    stack.worker.held_priority = LAST
    ask(stack)
    wait_until(lambda: stack.worker.requests[-1].priority == LAST and stack.worker.num_running == 1)
    ask(stack)
    wait_until(lambda: stack.worker.num_cancelled >= 1)
    assert compared(stack) == 0
    # It is taken up again.
    stack.worker.held_priority = None
    wait_until(lambda: compared(stack) == 2)
    assert sum(quality(stack)["samples"].values()) == 2


def test_a_client_that_leaves_is_not_looked_at(stack: RouterStack) -> None:
    stack.worker.token_delay_seconds = 0.2
    stack.worker.num_repeats = 20
    with httpx2.stream("POST", f"{stack.url}/v1/chat/completions", json=body() | {"stream": True}) as reply:
        next(reply.iter_lines())
    wait_until(lambda: stack.worker.num_cancelled == 1)
    stack.worker.token_delay_seconds = 0.0
    ask(stack)
    wait_until(lambda: compared(stack) == 1)
    assert sum(quality(stack)["samples"].values()) == 1


def test_without_a_share_nothing_is_run_again() -> None:
    with RouterStack(RouterSettings(guard_share=0.0)) as stack:
        ask(stack)
        ask(stack)
        assert len(stack.worker.requests) == 2
        assert quality(stack)["share"] == 0.0


def test_only_an_administrator_asks_for_it() -> None:
    with RouterStack(RouterSettings(guard_share=0.0, api_key="secret")) as stack:  # type: ignore[arg-type]
        assert stack.http.get("/admin/quality").status_code == 401
        assert stack.http.get("/admin/quality", headers={"authorization": "Bearer secret"}).status_code == 200


def test_too_many_tags_are_refused() -> None:
    with pytest.raises(ValueError, match="name 16 tags together"):
        RouterSettings(guard_budgets={f"tag{index}": 0.1 for index in range(16)})
    with pytest.raises(ValueError, match="'a b' must be letters"):
        RouterSettings(guard_budgets={"a b": 0.1})
