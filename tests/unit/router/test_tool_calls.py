"""Calls are found in a reply's text however it is cut, and what is no call stays text."""

from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.domain.tool_calls import ToolCallParser
from services.router.domain.tools import Tool, ToolCall, json_text

PARAMETERS = {"city": "string", "days": "integer", "exact": "boolean", "where": "object", "names": "array"}
DEFINITION = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {name: {"type": kind} for name, kind in PARAMETERS.items()}},
    },
}
TOOLS = (Tool("weather", json_text(DEFINITION)), Tool("now", '{"type": "function", "function": {"name": "now"}}'))
JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 3}}\n</tool_call>'
TAGGED_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"  # noqa: E501
ULM = '{"city": "Ulm", "days": 3}'


def parse(pieces: Iterable[str]) -> list[str | ToolCall]:
    """Neighbouring texts joined."""
    numbers = count()
    parser = ToolCallParser(TOOLS, lambda: f"call-{next(numbers)}")
    found: list[str | ToolCall] = []
    for piece in [*(each for text in pieces for each in parser.push(text)), *parser.flush()]:
        if isinstance(piece, str) and found and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


def call(arguments: str, name: str = "weather", number: int = 0) -> ToolCall:
    return ToolCall(f"call-{number}", name, arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("Just words. \n", ["Just words. \n"]),
        (JSON_CALL, [call(ULM)]),
        (TAGGED_CALL, [call(ULM)]),
        (f"I look.\n\n{JSON_CALL}\n", ["I look.", call(ULM)]),
        (f"{JSON_CALL}\n{TAGGED_CALL}", [call(ULM), call(ULM, number=1)]),
        (f"{JSON_CALL}\nDone.", [call(ULM), "\nDone."]),
        ('<tool_call>{"name": "now"}</tool_call>', [call("{}", "now")]),
        ('<tool_call>{"name": "now", "arguments": {}}', [call("{}", "now")]),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>", [call("{}", "now")]),
        (
            "<tool_call><function=weather><parameter=exact>True</parameter><parameter=where>{\"a\": [1]}</parameter>"
            "<parameter=city>\n two\nlines \n</parameter><parameter=names>odd</parameter></function></tool_call>",
            [call('{"exact": true, "where": {"a": [1]}, "city": " two\\nlines ", "names": "odd"}')],
        ),
    ],
)  # fmt: skip
def test_calls_and_text(text: str, expected: list[str | ToolCall]) -> None:
    assert parse([text]) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{}</tool_call>",
        "x \n<tool_call>\nnot JSON\n</tool_call> y",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>',
        "<tool_call>" + "[" * 50_000 + "</tool_call>",
        "<tool_call><function=unknown></function></tool_call>",
        "<tool_call><function=weather>loose words</function></tool_call>",
        "<tool_call><function=weather><parameter=city>Ulm</parameter></tool_call>",
        "</tool_call> < <tool <tool_cal",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse([text]) == [text]


def test_a_bad_call_does_not_hide_the_next() -> None:
    bad = "<tool_call>{bad}</tool_call>"
    assert parse([f"{bad}\n{JSON_CALL}"]) == [bad, call(ULM)]


PIECES = st.lists(
    st.sampled_from(
        [JSON_CALL, TAGGED_CALL, "<tool_call>", "</tool_call>", "<tool", "_call>", "\n", "  ", "text", "{", "}", "<", "\u2028",
         '{"name": "now", "arguments": {}}', "<function=now>", "</function>", "\x1c"]
    ),
    max_size=12,
)  # fmt: skip


@given(st.data(), PIECES)
def test_any_cut_gives_the_same(data: st.DataObject, pieces: list[str]) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse([text])
    assert parse(chunks) == whole
    assert parse(text) == whole
    if not any(isinstance(piece, ToolCall) for piece in whole):
        assert "".join(str(piece) for piece in whole) == text
