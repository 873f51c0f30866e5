"""Anthropic's own client against the router: documents, tools, streams, usage, errors."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from services.router.settings import RouterSettings
from tests.router_stack import RouterStack, wait_until
from tests.stub_worker import CONTEXT_LENGTH, MODEL_NAME
from tests.tool_templates import TAGGED_CALLS

TEXT = "The river city has a long history of trade, bridges and floods. " * 4
SOURCE = {"type": "text", "media_type": "text/plain", "data": TEXT}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TOOLS: Any = [
    {
        "name": "weather",
        "description": "The weather of a city, for the days that follow.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
USER: Any = {"role": "user", "content": "What is the answer?"}


def asked(title: str, **more: object) -> Any:  # noqa: ANN401 # the client's types are unions of dictionaries
    document = {"type": "document", "title": title, "context": "From the archive.", "source": SOURCE} | more
    return {"role": "user", "content": [document, {"type": "text", "text": "What is the answer?"}]}


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    stack = RouterStack()
    stack.worker.chat_template = TAGGED_CALLS
    with stack:
        yield stack


@pytest.fixture
def client(stack: RouterStack) -> Iterator[anthropic.Anthropic]:
    stack.worker.reply = "The answer is 42, naïvely: 🦉."
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_document_is_captured_then_reused(client: anthropic.Anthropic, stack: RouterStack) -> None:
    messages = [asked("one", cache_control={"type": "ephemeral", "ttl": "1h"})]
    replies = [
        client.messages.create(model=MODEL_NAME, max_tokens=100, system="Be brief.", messages=messages)
        for _ in range(2)
    ]
    assert [reply.content[0].text for reply in replies if reply.content[0].type == "text"] == [stack.worker.reply] * 2
    assert [reply.stop_reason for reply in replies] == ["end_turn"] * 2
    first, second = (reply.usage for reply in replies)
    assert first.cache_creation_input_tokens
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens
    totals = {
        usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
        for usage in (first, second)
    }
    counted = client.messages.count_tokens(model=MODEL_NAME, system="Be brief.", messages=messages)
    assert totals == {counted.input_tokens}


def test_the_same_document_through_both_apis_is_one_segment(client: anthropic.Anthropic, stack: RouterStack) -> None:
    document = {"title": "shared", "text": TEXT}
    body = {"model": MODEL_NAME, "messages": [USER], "documents": [document], "hypic": {"explain": True}}
    stack.http.post("/v1/chat/completions", json=body).raise_for_status()
    reply: Any = client.messages.create(
        model=MODEL_NAME,
        max_tokens=5,
        messages=[asked("shared") | {"content": [{"type": "document", "title": "shared", "source": SOURCE}]}, USER],
        extra_body={"hypic": {"explain": True}},
    )
    assert [part["served"] for part in reply.hypic["parts"] if part["kind"] == "segment"] == ["hit"]
    assert reply.stop_reason == "max_tokens"


def test_a_stream_is_what_the_whole_reply_is(client: anthropic.Anthropic, stack: RouterStack) -> None:
    stack.worker.reply = f"I look.\n{CALL}"
    with client.messages.stream(model=MODEL_NAME, max_tokens=200, messages=[USER], tools=TOOLS) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "input_json")]
        streamed = stream.get_final_message()
    whole = client.messages.create(model=MODEL_NAME, max_tokens=200, messages=[USER], tools=TOOLS)
    text, call = streamed.content
    assert text.type == "text"
    assert text.text == "I look."
    assert call.type == "tool_use"
    assert call.input == {"city": "Ulm"}
    assert [block.type for block in whole.content] == ["text", "tool_use"]
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": TOOLS[0]["name"]}])
def test_calls_are_forced(client: anthropic.Anthropic, stack: RouterStack, choice: dict[str, str]) -> None:
    stack.worker.reply = CALL
    asked: Any = {"max_tokens": 200, "messages": [USER], "tools": TOOLS, "tool_choice": choice}
    whole = client.messages.create(model=MODEL_NAME, **asked)
    assert whole.stop_reason == "tool_use"
    grammar = stack.worker.requests[-1].grammar.grammar
    assert TOOLS[0]["name"] in grammar
    assert ("call)*" in grammar) is (choice["type"] == "any")
    asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    client.messages.create(model=MODEL_NAME, **asked)
    assert "call)*" not in stack.worker.requests[-1].grammar.grammar


def test_results_go_back_and_tools_are_reused(client: anthropic.Anthropic, stack: RouterStack) -> None:
    stack.worker.reply = CALL
    first = client.messages.create(model=MODEL_NAME, max_tokens=200, messages=[USER], tools=TOOLS)
    (call,) = first.content
    assert call.type == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    turn: Any = {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}
    called: Any = {"role": "assistant", "content": [call.model_dump()]}
    second: Any = client.messages.create(
        model=MODEL_NAME,
        max_tokens=200,
        messages=[USER, called, turn],
        tools=TOOLS,
        extra_body={"hypic": {"explain": True}},
    )
    assert [part["served"] for part in second.hypic["parts"] if part["kind"] == "segment"] == ["prefix"]
    prompt = stack.worker.requests[-1]
    text = stack.worker.tokenizer.decode(
        [i for part in prompt.parts for i in part.token_ids], skip_special_tokens=False
    )
    assert "<function=weather>\n<parameter=city>\nUlm\n" in text
    assert "<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>" in text


def test_stop_sequences_are_named(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(model=MODEL_NAME, max_tokens=100, messages=[USER], stop_sequences=["never", "42, n"])
    assert reply.stop_reason == "stop_sequence"
    assert reply.stop_sequence == "42, n"
    assert reply.content[0].type == "text"
    assert reply.content[0].text == "The answer is "


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [asked("x", source={"type": "url", "url": "http://localhost"})]}, "content[0].source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]}, "content[0].input"),
        ({"system": [{"type": "document", "source": SOURCE}]}, "system"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": CONTEXT_LENGTH}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ({"tools": [{"name": "two words", "input_schema": {}}]}, "name"),
        ({"messages": [asked("x", cache_control={"type": "forever"})]}, "cache_control.type"),
    ],
)  # fmt: skip
def test_errors_have_the_envelope_and_name_the_field(
    client: anthropic.Anthropic, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=MODEL_NAME, max_tokens=5, messages=[USER], extra_body=change)
    error: Any = refused.value.body
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]
    assert refused.value.request_id


def test_other_errors_are_the_clients_own_kinds(client: anthropic.Anthropic, stack: RouterStack) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", max_tokens=5, messages=[USER])
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="nobody", messages=[USER])
    assert stack.http.get("/v1/messages").json()["type"] == "error"


def test_a_break_in_a_stream_is_its_last_event(stack: RouterStack) -> None:
    stack.worker.dies_after_tokens = 2
    try:
        body = {"model": MODEL_NAME, "max_tokens": 50, "messages": [USER], "stream": True}
        lines = stack.http.post("/v1/messages", json=body).text.strip().split("\n\n")
    finally:
        stack.worker.dies_after_tokens = -1
    assert lines[-1].startswith("event: error\n")
    assert json.loads(lines[-1].partition("data: ")[2])["error"]["type"] == "overloaded_error"
    wait_until(lambda: not stack.cache.leases)


def test_a_key_comes_in_either_header() -> None:
    settings = RouterSettings(api_key="secret-key")  # type: ignore[arg-type] # pydantic converts
    with RouterStack(settings) as stack:
        with anthropic.Anthropic(base_url=stack.url, api_key="secret-key") as client:
            assert client.messages.create(model=MODEL_NAME, max_tokens=5, messages=[USER]).content
        with (
            anthropic.Anthropic(base_url=stack.url, api_key="other", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError),
        ):
            client.messages.create(model=MODEL_NAME, max_tokens=5, messages=[USER])
