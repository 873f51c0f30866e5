"""Tools through the real client: calls come as `tool_calls`, whole and streamed, and go back into the next prompt."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.router_stack import RouterStack
from tests.stub_worker import MODEL_NAME
from tests.tool_templates import TAGGED_CALLS

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city, for the days that follow.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
MESSAGES: Any = [{"role": "user", "content": "How is the weather in Ulm?"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[RouterStack]:
    stack = RouterStack()
    stack.worker.chat_template = TAGGED_CALLS
    with stack:
        yield stack


@pytest.fixture
def client(stack: RouterStack) -> Iterator[openai.OpenAI]:
    stack.worker.reply = f"I look.\n{CALL}\n{CALL}"
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_calls_are_taken_out_of_a_whole_reply(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, tools=TOOLS, tool_choice="auto")
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.tool_calls is not None
    first, second = choice.message.tool_calls
    assert first.type == second.type == "function"
    assert first.function.name == "weather"
    assert json.loads(first.function.arguments) == {"city": "Ulm"}
    assert first.id != second.id


def test_calls_are_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL_NAME, messages=MESSAGES, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.tool_calls is not None
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Ulm"}'] * 2


def test_a_reply_of_one_call_has_no_content(client: openai.OpenAI, stack: RouterStack) -> None:
    stack.worker.reply = CALL
    reply = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, tools=TOOLS)
    assert reply.choices[0].message.content is None
    assert reply.choices[0].finish_reason == "tool_calls"


def test_a_cut_reply_says_length(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, tools=TOOLS, max_tokens=20)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.tool_calls is None


@pytest.mark.parametrize("offer", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_what_is_not_to_be_called_stays_text(client: openai.OpenAI, offer: dict[str, Any]) -> None:
    reply = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, **offer)
    assert reply.choices[0].message.content == f"I look.\n{CALL}\n{CALL}"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.tool_calls is None


def test_the_next_turn_reuses_the_tools(client: openai.OpenAI) -> None:
    first: Any = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, tools=TOOLS)
    message = first.choices[0].message.model_dump(exclude_none=True)
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"rain {CALL}"} for call in message["tool_calls"]
    ]
    second: Any = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "system", "content": "Other words."}, *MESSAGES, message, *results],
        tools=TOOLS,
        extra_body={"hypic": {"explain": True}},
    )
    (block,) = [part for part in second.hypic["parts"] if part["kind"] == "segment"]
    assert block["served"] == "hit"
    assert block["reused_tokens"] > 0


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("choice", "reason", "extra", "several"),
    [
        ("required", "tool_calls", {}, True),
        ("required", "tool_calls", {"parallel_tool_calls": False}, False),
        # As OpenAI ends it: the call was not the model's own choice.
        (NAMED, "stop", {}, False),
    ],
)
def test_calls_are_forced(
    client: openai.OpenAI, stack: RouterStack, choice: object, reason: str, extra: dict[str, Any], several: bool
) -> None:
    """The worker is told to hold the reply to the tools' grammar; its calls come out whole and streamed."""
    stack.worker.reply = CALL
    asked: Any = {"model": MODEL_NAME, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, **extra}
    whole = client.chat.completions.create(**asked).choices[0]
    grammar = stack.worker.requests[-1].grammar.grammar
    assert grammar.startswith("start: call")
    assert "weather" in grammar
    assert ("call)*" in grammar) is several
    assert (whole.finish_reason, whole.message.content) == (reason, None)
    assert whole.message.tool_calls is not None
    assert [call.function.name for call in whole.message.tool_calls if call.type == "function"] == ["weather"]
    deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    called = [call.function for delta in deltas for call in delta.delta.tool_calls or []]
    assert [function.name for function in called if function] == ["weather"]
    assert deltas[-1].finish_reason == reason
