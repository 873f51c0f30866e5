"""Tool calls in a reply's text, found as it comes.

Two forms stand between `<tool_call>` and `</tool_call>`: a JSON object with `name` and `arguments`, and
`<function=NAME>` with `<parameter=NAME>` blocks. Whatever is neither, or calls a tool that was not offered, stays text.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from services.router.domain.tools import Tool, ToolCall, json_text, new_call_id

__all__ = ["ToolCallParser"]

# What templates make of these values where they write them as Python does.
_PYTHON = {"True": True, "False": False, "None": None}
_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
# What a call may still begin with: white space, and as much of the opening tag as is there.
_HELD = re.compile(r"\s*(?:" + "|".join(re.escape(_OPEN[:size]) for size in range(len(_OPEN) - 1, 0, -1)) + r")?\Z")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)


class ToolCallParser:
    """Takes a reply's text in pieces of any size and gives it back as texts and calls.

    White space ahead of a call, and behind it up to the next one or the end, belongs to neither.
    """

    def __init__(self, tools: Sequence[Tool], make_id: Callable[[], str] = new_call_id) -> None:
        self._types = {tool.name: tool.parameter_types() for tool in tools}
        self._make_id = make_id
        self._buffer = ""
        self._searched = 0
        self._space = ""
        self._is_in_call = False
        self._is_behind_call = False
        self._advances = False

    def push(self, text: str) -> Iterator[str | ToolCall]:
        """What these characters complete."""
        self._buffer += text
        while True:
            found = self._take_call() if self._is_in_call else self._take_text()
            yield from found
            if not self._advances:
                return

    def flush(self) -> Iterator[str | ToolCall]:
        """What was held back; nothing may follow. A call whose end is missing alone is one."""
        rest, self._buffer = self._buffer, ""
        if self._is_in_call:
            yield from self._read(rest, rest)
        elif rest and not (self._is_behind_call and rest.isspace()):
            yield rest

    def _take_text(self) -> Iterator[str | ToolCall]:
        at = self._buffer.find(_OPEN, self._searched)
        self._advances = at >= 0
        if at >= 0:
            text = self._buffer[:at]
            shown = text.rstrip()
            self._space = text[len(shown) :]
            self._buffer = self._buffer[at + len(_OPEN) :]
            self._searched = 0
            self._is_in_call = True
            if shown:
                self._is_behind_call = False
                yield shown
            return
        held = _HELD.search(self._buffer)
        cut = held.start() if held else len(self._buffer)
        if cut:
            self._is_behind_call = False
            yield self._buffer[:cut]
            self._buffer = self._buffer[cut:]
        self._searched = 0

    def _take_call(self) -> Iterator[str | ToolCall]:
        at = self._buffer.find(_CLOSE, self._searched)
        self._advances = at >= 0
        if at < 0:
            self._searched = max(0, len(self._buffer) - len(_CLOSE) + 1)
            return
        body = self._buffer[:at]
        self._buffer = self._buffer[at + len(_CLOSE) :]
        self._searched = 0
        self._is_in_call = False
        yield from self._read(body, body + _CLOSE)

    def _read(self, body: str, raw: str) -> Iterator[str | ToolCall]:
        call = self._read_json(body) or self._read_tagged(body)
        if call is None:
            self._is_behind_call = False
            yield f"{self._space}{_OPEN}{raw}"
        else:
            self._is_behind_call = True
            yield call

    def _read_json(self, body: str) -> ToolCall | None:
        value = _read_value(body)
        if not isinstance(value, dict):
            return None
        return self._call(value.get("name"), value.get("arguments", value.get("parameters", {})))

    def _read_tagged(self, body: str) -> ToolCall | None:
        function = _FUNCTION.fullmatch(body)
        if function is None:
            return None
        types = self._types.get(function[1], {})
        arguments: dict[str, Any] = {}
        at = 0
        while parameter := _PARAMETER.match(function[2], at):
            arguments[parameter[1]] = _value(parameter[2], types.get(parameter[1], "string"))
            at = parameter.end()
        if function[2][at:].strip():
            return None
        return self._call(function[1], arguments)

    def _call(self, name: object, arguments: object) -> ToolCall | None:
        if not isinstance(name, str) or name not in self._types or not isinstance(arguments, dict):
            return None
        text = json_text(arguments)
        try:
            text.encode()
        except UnicodeEncodeError:
            # JSON can spell half a character; no text encoding can carry it further.
            return None
        return ToolCall(self._make_id(), name, text)


_NOTHING = object()


def _read_value(text: str) -> Any:  # noqa: ANN401 # any JSON value
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _value(text: str, kind: str) -> Any:  # noqa: ANN401 # any JSON value
    """A parameter's value: strings stand as they are, without the line breaks round them; others are JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    if kind == "string":
        return text
    value = _read_value(text)
    return _PYTHON.get(text.strip(), text) if value is _NOTHING else value
