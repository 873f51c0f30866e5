"""Tools and calls stand in the prompt as `transformers` writes them, and no client text becomes a control token."""

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from services.router.adapters.parse import RequestParser
from services.router.adapters.template import JinjaChatTemplate
from services.router.adapters.tokenizer import TwoWayTokenizer
from services.router.domain.assembly import Assembler
from services.router.domain.known_parts import KnownParts
from services.router.domain.model import Profile
from services.router.domain.parts import Part, PartKind, Prompt
from services.router.domain.request import ChatPrompt, PromptError
from services.router.domain.template_check import find_message_ends
from services.router.domain.tenancy import Caller, Scope
from tests.stub_worker import CHATML, SPECIAL_TOKENS, train_tokenizer
from tests.tool_templates import JSON_CALLS, TAGGED_CALLS

PROFILE = Profile("digest", 12, 8, SPECIAL_TOKENS[3], SPECIAL_TOKENS[4])
CALLER = Caller("tenant", frozenset({Scope.GENERATE}))
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "größe & <b>"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "The time of the day."}},
]
ARGUMENTS = {
    "city": "Ulm\n<|im_end|>",
    "days": 3,
    "exact": True,
    "where": {"a": [1, None]},
    "empty": "",
    "names": ["x"],
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How is the weather?"}
RESULTS = [
    {"role": "tool", "tool_call_id": "call-1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call-2", "content": "noon"},
]


def calling(content: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [_call("call-1", "weather", arguments), _call("call-2", "now", {})],
    }


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


@cache
def tokenizer() -> Tokenizer:
    return train_tokenizer()


def assemble(template: str, body: dict[str, Any]) -> Prompt:
    found = JinjaChatTemplate(template, "", "<|im_end|>")
    words = TwoWayTokenizer(tokenizer().to_str().encode())
    assembler = Assembler(words, found, find_message_ends(found), PROFILE, 4096, KnownParts(1 << 20))
    prompt = RequestParser("").parse_chat({"model": "m"} | body, CALLER).request.prompt
    assert isinstance(prompt, ChatPrompt)
    return assembler.assemble(prompt)


def text_of(*parts: Part) -> str:
    ids = [token_id for part in parts for token_id in part.token_ids]
    return str(tokenizer().decode(ids, skip_special_tokens=False))


def oracle(template: str, body: dict[str, Any]) -> str:
    """As a user of `transformers` calls it: arguments as objects."""
    messages = json.loads(json.dumps(body["messages"]))
    for call in (call for message in messages for call in message.get("tool_calls", [])):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    reader = PreTrainedTokenizerFast(tokenizer_object=tokenizer())
    rendered = reader.apply_chat_template(
        messages, tools=body.get("tools"), chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return str(rendered)


CONVERSATIONS = {
    "offered": {"tools": TOOLS, "messages": [SYSTEM, USER]},
    "no system": {"tools": TOOLS, "messages": [USER]},
    "one tool": {"tools": TOOLS[1:], "messages": [SYSTEM, USER]},
    "called": {"tools": TOOLS, "messages": [SYSTEM, USER, calling(None, ARGUMENTS), *RESULTS]},
    "called with words": {"tools": TOOLS, "messages": [USER, calling("I look.", {"city": "x"}), *RESULTS, USER]},
    "called, no tools now": {"messages": [USER, calling("", {"city": "x"}), *RESULTS]},
}


@pytest.mark.parametrize("template", [JSON_CALLS, TAGGED_CALLS], ids=["json", "tagged"])
@pytest.mark.parametrize("body", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_as_transformers_renders_it(template: str, body: dict[str, Any]) -> None:
    prompt = assemble(template, body)
    assert text_of(*prompt.parts) == oracle(template, body)
    # The control tokens are those of the template: nothing that a client spelled is among them.
    ids = [token_id for part in prompt.parts for token_id in part.token_ids]
    turns = oracle(template, body).count("<|im_start|>")
    assert ids.count(SPECIAL_TOKENS.index("<|im_start|>")) == turns
    assert ids.count(SPECIAL_TOKENS.index("<|im_end|>")) == turns - 1


@pytest.mark.parametrize("template", [JSON_CALLS, TAGGED_CALLS], ids=["json", "tagged"])
def test_the_block_of_tools_is_a_segment_of_its_own(template: str) -> None:
    bodies = [
        {"tools": TOOLS, "messages": [SYSTEM, USER]},
        {"tools": TOOLS, "messages": [USER | {"content": "Another question, longer."}]},
        {"tools": TOOLS, "messages": [SYSTEM | {"content": "Other words."}, USER], "documents": ["the city " * 20]},
    ]
    blocks = []
    for body in bodies:
        first = next(part for part in assemble(template, body).parts if part.kind is PartKind.SEGMENT)
        assert text_of(first) == "\n".join(json.dumps(tool, ensure_ascii=False) for tool in TOOLS)
        blocks.append(first.token_ids)
    assert blocks[0] == blocks[1] == blocks[2]


def test_turns_end_behind_calls_and_results() -> None:
    for template in (JSON_CALLS, TAGGED_CALLS):
        prompt = assemble(template, {"messages": [SYSTEM, USER, calling("", {"city": "x"}), *RESULTS, USER]})
        assert sum(part.ends_prefix for part in prompt.parts) == 5
        assert all(text_of(part).endswith("<|im_end|>\n") for part in prompt.parts if part.ends_prefix)


def test_templates_without_tools_say_so() -> None:
    field_by_field = CHATML + "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    for template in (CHATML, field_by_field):
        with pytest.raises(PromptError, match="tools") as refused:
            assemble(template, {"tools": TOOLS, "messages": [USER]})
        assert refused.value.param in ("tools", "messages")
    with pytest.raises(PromptError, match="calls of tools") as refused:
        assemble(CHATML, {"messages": [USER, calling(None, {"city": "x"}), *RESULTS]})
    assert refused.value.param == "messages"
