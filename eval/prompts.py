"""Questions as token ids: what the runs of an evaluation work with."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from eval.live.questions import normalise
from train.data import Document, Evidence, PromptEncoder, Question
from train.data.prompts import document_text

__all__ = ["ANSWER_LIMIT", "AnswerReader", "EvalPrompt", "EvidenceTokens", "PromptReader", "token_f1"]

# In tokens, the end included; the demo model's answers are shorter.
ANSWER_LIMIT = 40


@dataclass(frozen=True, slots=True)
class EvidenceTokens:
    """Tokens `[start, end)` of document `document`, counted from the document's first token."""

    document: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """One question. The prompt's ids are opening + documents + closing; answer ids end with the end of the message."""

    opening: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    closing: tuple[int, ...]
    answer: tuple[int, ...]
    acceptable: tuple[str, ...]
    question: str
    type: str
    evidence: tuple[EvidenceTokens, ...]

    @property
    def document_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(len(document) for document in self.documents)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole prompt."""
        return (*self.opening, *(token for document in self.documents for token in document), *self.closing)

    def accepts(self, text: str) -> bool:
        """Whether an answer is one of the acceptable ones."""
        return normalise(text) in {normalise(own) for own in self.acceptable}


class AnswerReader(Protocol):
    """What scoring needs to know of answers."""

    @property
    def end_id(self) -> int:
        """The token that ends a reply."""
        ...

    @property
    def answer_limit(self) -> int:
        """Longest answer in tokens, its end included."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of answer ids."""
        ...


class PromptReader:
    """Turns questions into ids by the demo model's prompt contract, and ids back into text."""

    def __init__(self, checkpoint: Path) -> None:
        tokenizer_file = checkpoint / "tokenizer.json"
        self.encoder = PromptEncoder(tokenizer_file)
        self._plain = Tokenizer.from_str(json.dumps(json.loads(tokenizer_file.read_text()) | {"added_tokens": []}))

    @property
    def end_id(self) -> int:
        """The token that ends a reply."""
        return int(self.encoder.message_end)

    @property
    def answer_limit(self) -> int:
        """See `AnswerReader`."""
        return ANSWER_LIMIT

    def read(self, questions: Iterable[Question]) -> Iterator[EvalPrompt]:
        """Every question as ids."""
        for question in questions:
            yield self._read(question)

    def opening(self, system: str) -> tuple[int, ...]:
        """Ids of a prompt with this system text up to where the first document begins."""
        return tuple(self.encoder.opening(system))

    def document(self, title: str, text: str) -> tuple[int, ...]:
        """Ids of one document with its markers."""
        return tuple(self.encoder.document(self.encoder.client([document_text(Document(title, text))])[0]))

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of answer ids."""
        return self.encoder.decode(token_ids)

    def _read(self, question: Question) -> EvalPrompt:
        prompt = self.encoder.prompt(question.system, question.documents, question.question)
        documents = tuple(prompt.ids[tokens.start : tokens.stop] for tokens in prompt.documents)
        return EvalPrompt(
            opening=prompt.ids[: prompt.documents[0].start],
            documents=documents,
            closing=prompt.ids[prompt.documents[-1].stop :],
            answer=tuple(self.encoder.reply(question.answer)),
            acceptable=question.acceptable,
            question=question.question,
            type=str(question.type),
            evidence=tuple(self._locate(question, evidence) for evidence in question.evidence),
        )

    def _locate(self, question: Question, evidence: Evidence) -> EvidenceTokens:
        document = question.documents[evidence.document]
        shift = len(document.title) + 1
        offsets = self._plain.encode(document_text(document), add_special_tokens=False).offsets
        start, end = evidence.start + shift, evidence.end + shift
        tokens = [index for index, (first, last) in enumerate(offsets) if last > start and first < end]
        # The document's opening marker is its first token.
        return EvidenceTokens(evidence.document, tokens[0] + 1, tokens[-1] + 2)


def token_f1(answer: str, acceptable: Iterable[str]) -> float:
    """The best word-level F1 of an answer against the acceptable ones."""
    return max((_f1(normalise(answer).split(), normalise(text).split()) for text in acceptable), default=0.0)


def _f1(answer: list[str], expected: list[str]) -> float:
    common = sum(min(answer.count(word), expected.count(word)) for word in set(expected))
    return 2 * common / (len(answer) + len(expected)) if common else 0.0
