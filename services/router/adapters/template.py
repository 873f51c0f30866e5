"""Chat templates: jinja2 in its sandbox, with what public templates rely on."""

import datetime
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.router.domain.model import ModelRefusedError
from services.router.domain.template_check import new_placeholder
from services.router.domain.text_ports import TemplateCall, TemplateError, TemplateMessage, TemplateValue

__all__ = ["JinjaChatTemplate"]


class JinjaChatTemplate:
    """A model's chat template; implements `ChatTemplate`."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        """Compile the template.

        Raises:
            ModelRefusedError: it is missing or no valid template.
        """
        if not source:
            raise ModelRefusedError("the worker's model has no chat template")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelRefusedError(f"the chat template cannot be compiled: {error}") from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render_history(self, messages: Sequence[TemplateMessage], tools: Sequence[str] = ()) -> str:
        """See `ChatTemplate`."""
        return self._render(messages, tools, {"add_generation_prompt": False})

    def render_prompt(self, messages: Sequence[TemplateMessage], tools: Sequence[str] = ()) -> str:
        """See `ChatTemplate`."""
        return self._render(messages, tools, {"add_generation_prompt": True})

    def _render(self, messages: Sequence[TemplateMessage], tools: Sequence[str], options: dict[str, bool]) -> str:
        rows = [_row(message) for message in messages]
        veil = new_placeholder()
        offered = [_veil(TemplateValue(_tool_shape(veil), tool)) for tool in tools] or None
        try:
            rendered = self._template.render(messages=rows, tools=offered, documents=None, **self._tokens, **options)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TemplateError(str(error)) from error
        if veil in rendered:
            raise TemplateError("it writes tools otherwise than as JSON")
        return rendered


class _VeiledObject(dict[str, Any]):
    """A client's object: a template may look into it, and what it writes of it as JSON is a placeholder."""

    placeholder = ""


class _VeiledArray(list[Any]):
    """The same of an array."""

    placeholder = ""


def _tool_shape(veil: str) -> dict[str, Any]:
    """Of a tool a template may learn that it is a function: its names and texts are the client's."""
    return {"type": "function", "function": {"name": veil, "description": veil, "parameters": veil}}


def _veil(given: TemplateValue) -> _VeiledObject | _VeiledArray:
    veiled: _VeiledObject | _VeiledArray
    veiled = _VeiledObject(given.value) if isinstance(given.value, dict) else _VeiledArray(given.value)
    veiled.placeholder = given.placeholder
    return veiled


def _row(message: TemplateMessage) -> dict[str, Any]:
    row: dict[str, Any] = {"role": str(message.role), "content": message.content}
    if message.answers:
        row["tool_call_id"] = message.answers
    if message.tool_calls:
        row["tool_calls"] = [_call_row(call) for call in message.tool_calls]
    return row


def _call_row(call: TemplateCall) -> dict[str, Any]:
    arguments = {
        name: _veil(value) if isinstance(value, TemplateValue) else value for name, value in call.arguments.items()
    }
    function = {"name": call.name, "arguments": _veil(TemplateValue(arguments, call.whole))}
    return {"id": call.call_id, "type": "function", "function": function}


def _to_json(
    value: Any,  # noqa: ANN401 # templates pass any JSON value
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `transformers` gives it to templates, but for clients' values, which are placeholders."""
    if isinstance(value, _VeiledObject | _VeiledArray):
        return value.placeholder
    if isinstance(value, list) and value and all(isinstance(each, _VeiledObject) for each in value):
        return f"[{', '.join(each.placeholder for each in value)}]"
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(datetime.UTC).strftime(pattern)
