"""Conversations over documents as token ids of any chat model, by the router's own assembly."""

from collections.abc import Sequence
from pathlib import Path

from eval.prompts import EvalPrompt
from services.router.domain.parts import Part, PartKind
from services.router.domain.request import ChatPrompt, Document, Message, Role, Text
from services.router.served_model import ServedModel
from services.worker.models.errors import CheckpointError

__all__ = ["ChatReader"]

_LONG_ENOUGH = Document("Every document of this length is a segment. " * 40)
_ANY_SYSTEM = "?"


class ChatReader:
    """Turns questions over documents into ids as the router would, and ids back into text; implements `AnswerReader`.

    Raises:
        CheckpointError: nothing says where replies end.
    """

    def __init__(self, checkpoint: Path, model: ServedModel, answer_limit: int) -> None:
        if not model.info.stop_token_ids:
            raise CheckpointError(
                f"{checkpoint / 'generation_config.json'}: eos_token_id is missing, so that no reply would end; add it"
            )
        self._model = model
        self._answer_limit = answer_limit

    @property
    def end_id(self) -> int:
        """The token that ends a reply."""
        return self._model.info.stop_token_ids[0]

    @property
    def answer_limit(self) -> int:
        """See `AnswerReader`."""
        return self._answer_limit

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of answer ids."""
        return self._model.new_detokenizer().push(token_ids).strip()

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a client's text, without any special token."""
        return tuple(self._model.assembler.tokenizer.encode_plain(text))

    def start(self) -> tuple[int, ...]:
        """The template's opening of a user message: what stands right ahead of a prompt's first document."""
        parts = self._parts(_ANY_SYSTEM, "?", [_LONG_ENOUGH])
        return parts[_segments(parts).start - 1].token_ids

    def opening(self, system: str) -> tuple[int, ...]:
        """Everything ahead of a prompt's first document."""
        parts = self._parts(system, "?", [_LONG_ENOUGH])
        return _ids(parts[: _segments(parts).start])

    def assemble(self, system: str, question: str, documents: Sequence[Document]) -> EvalPrompt | None:
        """The prompt with no answer but the end of a reply; None where no document is long enough for a segment.

        Raises:
            PromptError: the router would refuse it.
        """
        parts = self._parts(system, question, documents)
        found = _segments(parts)
        if not found:
            return None
        return EvalPrompt(
            opening=_ids(parts[: found.start]),
            documents=tuple(parts[index].token_ids for index in found),
            closing=_ids(parts[found.stop :]),
            answer=(self.end_id,),
            acceptable=(),
            question=question,
            type="chat",
            evidence=(),
        )

    def _parts(self, system: str, question: str, documents: Sequence[Document]) -> Sequence[Part]:
        messages = [Message(Role.SYSTEM, (Text(system),))] if system else []
        messages.append(Message(Role.USER, (Text(question),)))
        return self._model.assembler.assemble(ChatPrompt(tuple(messages), tuple(documents))).parts


def _segments(parts: Sequence[Part]) -> range:
    """From the first segment to the last; a document too short to be one may stand between them."""
    found = [index for index, part in enumerate(parts) if part.kind is PartKind.SEGMENT]
    return range(found[0], found[-1] + 1) if found else range(0)


def _ids(parts: Sequence[Part]) -> tuple[int, ...]:
    return tuple(token for part in parts for token in part.token_ids)
