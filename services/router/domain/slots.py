"""Placeholders for client text in a rendered chat template: what each stands for, and whether the template kept them."""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.router.domain.request import Content, Message, PromptError, Role, Text
from services.router.domain.template_check import new_placeholder
from services.router.domain.text_ports import TemplateCall, TemplateMessage, TemplateValue
from services.router.domain.tools import Tool, ToolCall, json_text

__all__ = ["KeptSlot", "Slot", "SlotKind", "SlotTable", "tool_content"]

_NUMBER_DIGITS = 8


class SlotKind(StrEnum):
    """`call`: text of a call, which the template may write in one of two ways."""

    CONTENT = "content"
    TOOL = "tool"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Slot:
    """What a placeholder stands for. `closing`: the template text behind it that may end its message."""

    kind: SlotKind
    content: Content
    closing: str


# With the template's text behind it.
KeptSlot = tuple[Slot, str]


@dataclass(frozen=True, slots=True)
class _CallNumbers:
    """Placeholders of one call: of its name, of all arguments together, and of their names and values apart."""

    name: int
    whole: int
    apart: frozenset[int]

    def is_kept(self, found: Set[int]) -> bool:
        """Whether the name is there, and the arguments in one of the two ways; none may be written as nothing."""
        apart = self.apart & found
        is_whole = self.whole in found
        return self.name in found and (not apart if is_whole else apart == self.apart)


def tool_content(tool: Tool) -> Text:
    """What stands where the template writes a tool."""
    return Text(tool.definition, is_breakpoint=tool.is_breakpoint)


class SlotTable:
    """The placeholders of one prompt: a random mark and a number, so that no client text holds one.

    message_ends: the template text that closes a message of each role.
    """

    def __init__(self, message_ends: Mapping[Role, str]) -> None:
        self._ends = message_ends
        self._mark = new_placeholder()
        self._closing = ""
        self._slots: list[Slot] = []
        self._calls: list[_CallNumbers] = []

    def message(self, message: Message) -> TemplateMessage:
        """A message with placeholders for what it holds."""
        # Results of tools stand in a user's turn.
        self._closing = self._ends.get(Role.USER if message.role is Role.TOOL else message.role, "")
        content = "".join([self._add(SlotKind.CONTENT, each) for each in message.content])
        calls = tuple([self._call(call) for call in message.tool_calls])
        return TemplateMessage(message.role, content, calls, self._text(message.answers) if message.answers else "")

    def tool(self, tool: Tool) -> str:
        """The placeholder of a definition, which stands in the system's turn."""
        self._closing = self._ends.get(Role.SYSTEM, "")
        return self._add(SlotKind.TOOL, tool_content(tool))

    def split(self, rendered: str) -> tuple[str, list[KeptSlot]]:
        """The template's text ahead of the first placeholder; then what each stands for, with the text behind it.

        Raises:
            PromptError: the template has dropped, repeated or changed some of it.
        """
        opening, *pieces = rendered.split(self._mark)
        numbers = [int(piece[:_NUMBER_DIGITS]) for piece in pieces]
        self._check(numbers)
        texts = [piece[_NUMBER_DIGITS:] for piece in pieces]
        return opening, [(self._slots[number], text) for number, text in zip(numbers, texts, strict=True)]

    def _check(self, numbers: Sequence[int]) -> None:
        found = set(numbers)
        tools = self._numbers(SlotKind.TOOL)
        if [number for number in numbers if self._slots[number].kind is SlotKind.TOOL] != tools:
            raise PromptError(
                "this model's chat template knows no tools, or writes them in a form of its own",
                param="tools",
                code="unsupported_parameter",
            )
        if not all(call.is_kept(found) for call in self._calls):
            raise PromptError(
                "this model's chat template does not write calls of tools", param="messages", code="unsupported_content"
            )
        if len(found) != len(numbers) or not found.issuperset(self._numbers(SlotKind.CONTENT)):
            raise PromptError("the chat template does not keep these messages whole", param="messages")

    def _numbers(self, kind: SlotKind) -> list[int]:
        return [number for number, slot in enumerate(self._slots) if slot.kind is kind]

    def _call(self, call: ToolCall) -> TemplateCall:
        first = len(self._slots)
        name, whole = self._text(call.name), self._text(call.arguments)
        arguments = {self._text(key): self._value(value) for key, value in json.loads(call.arguments).items()}
        self._calls.append(_CallNumbers(first, first + 1, frozenset(range(first + 2, len(self._slots)))))
        return TemplateCall(self._text(call.call_id), name, whole, arguments)

    def _value(self, value: Any) -> Any:  # noqa: ANN401 # any JSON value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict | list):
            # The template sees which kind it is, and nothing in it.
            return TemplateValue(type(value)(), self._text(json_text(value)))
        return value

    def _text(self, text: str) -> str:
        return self._add(SlotKind.CALL, Text(text))

    def _add(self, kind: SlotKind, content: Content) -> str:
        self._slots.append(Slot(kind, content, self._closing))
        return f"{self._mark}{len(self._slots) - 1:0{_NUMBER_DIGITS}d}"
