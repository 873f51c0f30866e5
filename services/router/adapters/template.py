"""Chat templates: jinja2 in its sandbox, with what public templates rely on."""

import datetime
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.router.domain.model import ModelRefusedError
from services.router.domain.text_ports import TemplateError, TemplateMessage

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

    def render_history(self, messages: Sequence[TemplateMessage]) -> str:
        """See `ChatTemplate`."""
        return self._render(messages, {"add_generation_prompt": False})

    def render_prompt(self, messages: Sequence[TemplateMessage]) -> str:
        """See `ChatTemplate`."""
        return self._render(messages, {"add_generation_prompt": True})

    def _render(self, messages: Sequence[TemplateMessage], options: dict[str, bool]) -> str:
        rows = [{"role": str(message.role), "content": message.content} for message in messages]
        try:
            return self._template.render(messages=rows, tools=None, documents=None, **self._tokens, **options)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TemplateError(str(error)) from error


def _to_json(value: Any, indent: int | None = None) -> str:  # noqa: ANN401 # templates pass any JSON value
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(datetime.UTC).strftime(pattern)
