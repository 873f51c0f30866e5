"""What the router does about the state behind a reply: asks for it, keeps it where the next turn begins so, else drops it."""

from collections.abc import Iterator
from typing import Any

import pytest

from services.router.settings import RouterSettings
from tests.router_stack import RouterStack, wait_until
from tests.stub_worker import MODEL_NAME
from tests.tool_templates import TAGGED_CALLS

LONG = "The river city has a long history of trade, bridges and floods. "


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    with RouterStack() as stack:
        stack.worker.holds_turns = True
        yield stack


@pytest.fixture(autouse=True)
def fresh(stack: RouterStack) -> Iterator[None]:
    stack.worker.kept.clear()
    stack.worker.dropped.clear()
    stack.worker.requests.clear()
    yield
    # With the lease everything is settled.
    wait_until(lambda: not stack.cache.leases)
    stack.worker.holds_turns, stack.worker.refuses_turns = True, False
    stack.cache.forgets_tickets = False
    stack.worker.reply = "The answer is 42."


def ask(stack: RouterStack, salt: str, **more: object) -> dict[str, Any]:
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": LONG}],
        "hypic": {"explain": True},
        "cache_salt": salt,
    }
    response = stack.http.post("/v1/chat/completions", json=body | more)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def ends(stack: RouterStack) -> dict[str, float]:
    """How often each end was counted."""
    lines = [line for line in stack.http.get("/metrics").text.splitlines() if line.startswith("hypic_turns_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def end_of(stack: RouterStack, salt: str, **more: object) -> str:
    """What became of the state behind one reply, once that and the lease are settled."""
    before = ends(stack)
    ask(stack, salt, **more)
    wait_until(lambda: ends(stack) != before)
    wait_until(lambda: not stack.cache.leases)
    (end,) = [end for end, count in ends(stack).items() if count != before.get(end, 0)]
    return end


def test_the_next_turn_is_planned_with_the_reply(stack: RouterStack) -> None:
    assert end_of(stack, "next") == "kept"
    (kept,) = stack.worker.kept
    assert kept.held_key == b"held"
    assert stack.worker.dropped == []
    closing = list(stack.worker.requests[-1].closing_token_ids)
    assert closing == stack.worker.tokenizer.encode("<|im_end|>\n", add_special_tokens=False).ids
    turn = [{"role": "user", "content": LONG}, {"role": "assistant", "content": stack.worker.reply}]
    reply = ask(stack, "next", messages=[*turn, {"role": "user", "content": "And then?"}])
    served = [part["served"] for part in reply["hypic"]["parts"]]
    assert served == ["prefix", "prefix", "live", "live"]
    assert stack.worker.requests[-1].prefix_key == kept.key


@pytest.mark.parametrize(
    ("end", "more"),
    [
        ("length", {"max_tokens": 2}),
        ("stop", {"stop": ["answer"]}),
        ("not_composed", {"hypic": {"cold": "live"}}),
    ],
)
def test_why_it_is_not_kept(stack: RouterStack, end: str, more: dict[str, object]) -> None:
    document = {"type": "document", "text": LONG * 3}
    messages = [{"role": "user", "content": [document, {"type": "text", "text": "Well?"}]}]
    assert end_of(stack, f"why {end}", messages=messages, **more) == end
    assert stack.worker.kept == []


def test_a_worker_that_holds_or_keeps_nothing(stack: RouterStack) -> None:
    stack.worker.holds_turns = False
    assert end_of(stack, "holds nothing") == "not_held"
    stack.worker.holds_turns, stack.worker.refuses_turns = True, True
    assert end_of(stack, "keeps nothing") == "refused"
    assert stack.worker.dropped == [b"held"]


def test_a_reply_whose_text_has_other_tokens(stack: RouterStack) -> None:
    """Here the text of a special token, which a client's text can never become again."""
    stack.worker.reply = "The<|document_start|> answer"
    assert end_of(stack, "other") == "other_ids"
    assert stack.worker.dropped == [b"held"]


def test_what_was_invalidated_since_the_plan(stack: RouterStack) -> None:
    stack.cache.forgets_tickets = True
    assert end_of(stack, "invalidated") == "invalidated"
    assert stack.worker.kept == []
    assert stack.worker.dropped == [b"held"]


def test_what_is_kept_already(stack: RouterStack) -> None:
    assert [end_of(stack, "again"), end_of(stack, "again")] == ["kept", "known"]
    assert len(stack.worker.kept) == 1
    assert stack.worker.dropped == [b"held"]


@pytest.mark.parametrize(
    "more",
    [
        {"hypic": {"reuse": "off"}},
        {"hypic": {"refresh": 2}},
        {"n": 2},
        {"ignore_eos": True},
        {"documents": [{"text": LONG * 3}]},
    ],
    ids=["off", "refreshed", "choices", "no end", "documents that move on"],
)
def test_where_none_is_wanted(stack: RouterStack, more: dict[str, object]) -> None:
    before = ends(stack)
    ask(stack, f"none {more}", **more)
    wait_until(lambda: not stack.cache.leases)
    assert not any(request.closing_token_ids for request in stack.worker.requests)
    assert ends(stack) == before


def test_calls_of_tools_go_back_as_they_came() -> None:
    """Where the template writes them as the model does."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    stack = RouterStack()
    stack.worker.chat_template = TAGGED_CALLS
    stack.worker.holds_turns = True
    with stack:
        kept = "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n</function>\n</tool_call>"
        for reply, end in ((kept, "kept"), (kept.replace("\n", " "), "other_ids")):
            stack.worker.reply = reply
            assert end_of(stack, reply, tools=[tool]) == end


def test_it_can_be_switched_off() -> None:
    with RouterStack(RouterSettings(keep_turns=False)) as stack:
        stack.worker.holds_turns = True
        ask(stack, "off")
        assert not stack.worker.requests[-1].closing_token_ids
        assert ends(stack) == {}
