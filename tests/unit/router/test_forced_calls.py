"""Grammars of forced calls, followed by random logits: whatever the model would say, it is a call that the parser finds."""

import json
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLTokenizer

from services.router.domain.forced_calls import force_calls
from services.router.domain.request import GrammarKind, PromptError
from services.router.domain.tool_calls import ToolCallParser
from services.router.domain.tools import Tool, ToolCall
from services.worker.adapters.grammar_sources import build_matcher
from tests.unit.worker.test_grammars import END, TOKENIZER, TOKENIZER_JSON, VOCABULARY, compile_grammar, speak

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/point"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"point": POINT},
}


def offered(name: str, parameters: object = None) -> Tool:
    function = {"name": name} | ({} if parameters is None else {"parameters": parameters})
    return Tool(name, json.dumps({"type": "function", "function": function}))


TOOLS = (offered("get-weather_2", WEATHER), offered("point", POINT))


def said(tools: tuple[Tool, ...], is_parallel: bool, seed: int) -> list[str | ToolCall]:
    grammar = force_calls(tools, is_parallel)
    assert grammar.kind is GrammarKind.GRAMMAR
    text = speak(compile_grammar(grammar=grammar.source), seed)
    parser = ToolCallParser(tools)
    return [*parser.push(text), *parser.flush()]


@pytest.mark.parametrize("seed", range(12))
def test_a_reply_is_one_call_that_holds_to_its_schema(seed: int) -> None:
    (call,) = said(TOOLS, False, seed)
    assert isinstance(call, ToolCall)
    schema = {"get-weather_2": WEATHER, "point": POINT}[call.name]
    jsonschema_rs.validate(schema, json.loads(call.arguments))


def test_every_tool_may_be_chosen_and_a_named_one_is_alone() -> None:
    chosen = {call.name for seed in range(12) for call in said(TOOLS, False, seed) if isinstance(call, ToolCall)}
    assert chosen == {"get-weather_2", "point"}
    named = {call.name for seed in range(6) for call in said(TOOLS[1:], False, seed) if isinstance(call, ToolCall)}
    assert named == {"point"}


@pytest.mark.parametrize(("is_parallel", "taken"), [(True, True), (False, False)])
def test_several_calls_only_where_they_are_allowed(is_parallel: bool, taken: bool) -> None:
    (call,) = said(TOOLS[1:], False, 1)
    assert isinstance(call, ToolCall)
    text = f'<tool_call>\n{{"name": "point", "arguments": {call.arguments}}}\n</tool_call>'
    source = force_calls(TOOLS[1:], is_parallel).source
    for said_twice, wanted in ((text, True), (f"{text}\n{text}", taken)):
        matcher = build_matcher(LLTokenizer(TOKENIZER_JSON.decode(), VOCABULARY, [END]), "grammar", source)
        assert (matcher.try_consume_tokens(ids := TOKENIZER.encode(said_twice).ids) == len(ids)) is wanted


def test_arguments_stand_as_templates_write_them() -> None:
    """So that the call reads the same when it comes back in the next turn."""
    for seed in range(6):
        (call,) = said(TOOLS, False, seed)
        assert isinstance(call, ToolCall)
        text = speak(compile_grammar(grammar=force_calls(TOOLS, False).source), seed)
        assert f'"arguments": {call.arguments}}}' in text


def test_a_tool_without_parameters_takes_any_object() -> None:
    source = force_calls((offered("now"),), False).source
    assert '%json {"type": "object"' in source
    compile_grammar(grammar=source)


def test_quotes_and_line_breaks_of_a_schema_stay_in_it() -> None:
    """A description cannot leave its place in the grammar."""
    text = 'ends here"}\nstart: "free"\n%json {'
    schema = {**POINT, "description": text, "properties": {"x": {"enum": [text]}}}
    (call,) = said((offered("f", schema),), False, 1)
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"x": text}


def test_what_cannot_be_forced_is_refused_by_name() -> None:
    with pytest.raises(PromptError) as refused:
        force_calls((TOOLS[0], offered("f", {"type": "string"})), False)
    assert refused.value.param == "tools[1].function.parameters.type"
    with pytest.raises(PromptError, match="offer fewer tools") as refused:
        force_calls((offered("f", {"type": "object", "description": "x" * (1 << 16)}),), False)
    assert refused.value.param == "tools"
