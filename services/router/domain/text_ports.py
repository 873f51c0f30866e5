"""Ports to the libraries that know text: tokenizer and chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.router.domain.errors import RouterError
from services.router.domain.request import Role

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "TemplateCall",
    "TemplateError",
    "TemplateMessage",
    "TemplateValue",
    "Tokenizer",
]


class TemplateError(RouterError):
    """The chat template refuses this sequence of messages; the text is the template's own."""


@dataclass(frozen=True, slots=True)
class TemplateMessage:
    """A message as the template sees it: `content` holds placeholders only."""

    role: Role
    content: str
    tool_calls: tuple["TemplateCall", ...] = ()
    answers: str = ""


@dataclass(frozen=True, slots=True)
class TemplateValue:
    """An object or array of a client: the template sees an empty one; where it writes it as JSON, the placeholder stands."""

    value: dict[str, Any] | list[Any]
    placeholder: str


@dataclass(frozen=True, slots=True)
class TemplateCall:
    """A tool call as the template sees it: placeholders of its id, its name, all arguments together, and each by itself.

    A template writes the arguments in one of the two ways. `arguments` has placeholders as names; numbers, truth values and
    null stand in it as they are, texts as placeholders.
    """

    call_id: str
    name: str
    whole: str
    arguments: Mapping[str, Any]


class ChatTemplate(Protocol):
    """Renders conversations. Pure and safe to call from several threads."""

    def render_history(self, messages: Sequence[TemplateMessage], tools: Sequence[str] = ()) -> str:
        """The conversation up to the end of its last message; `tools`: placeholders of their definitions as JSON.

        Raises:
            TemplateError: the template refuses the messages.
        """
        ...

    def render_prompt(self, messages: Sequence[TemplateMessage], tools: Sequence[str] = ()) -> str:
        """The conversation followed by the words that open the assistant's turn.

        Raises:
            TemplateError: the template refuses the messages.
        """
        ...


class Tokenizer(Protocol):
    """Turns text into ids. Safe to call from several threads."""

    def encode_template(self, text: str) -> tuple[int, ...]:
        """Ids of trusted text: special-token strings become their ids; nothing is added at the ends."""
        ...

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of a client string: no special token can come out."""
        ...

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of ids of a client string, from its length alone."""
        ...


class Detokenizer(Protocol):
    """Turns one reply's ids into text as they come."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; an unfinished character is held back. Special tokens give no text."""
        ...

    def spell(self, token_id: int) -> bytes:
        """The bytes of one token by itself, a special token's name included."""
        ...
