"""The documents and questions of the demo, and the requests that it makes of them."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["QUESTIONS", "DemoDocument", "DemoRequest", "Scenario", "load_scenario"]

FOLDER = Path(__file__).resolve().parent / "documents"
# Each model is asked what it can answer.
QUESTIONS = {"demo": "questions.json", "smollm2": "smollm2.json"}


@dataclass(frozen=True, slots=True)
class DemoDocument:
    """One document as the API takes it."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request of the demo. in_sentences: the model answers in sentences of its own, in which the answer must stand."""

    label: str
    documents: tuple[DemoDocument, ...]
    question: str
    answer: str
    reuse: str = "compose"
    in_sentences: bool = False

    def is_right(self, reply: str) -> bool:
        """Whether a reply is the answer, word for word, or holds it where the model answers in sentences."""
        return self.answer in reply if self.in_sentences else self.answer == reply


@dataclass(frozen=True, slots=True)
class Scenario:
    """questions: pairs of question and right answer; revised: a changed document, its question and new answer.

    in_sentences: see `DemoRequest`.
    """

    system: str
    documents: tuple[DemoDocument, ...]
    questions: tuple[tuple[str, str], ...]
    revised: DemoDocument
    revised_question: tuple[str, str]
    in_sentences: bool

    def requests(self) -> Iterator[DemoRequest]:
        """Cold; the same documents in other orders; one of them changed; the same without reuse."""
        return (replace(request, in_sentences=self.in_sentences) for request in self._asked())

    def _asked(self) -> Iterator[DemoRequest]:
        first, *others = self.questions
        yield DemoRequest("every document is new", self.documents, *first)
        shuffler = random.Random(1)
        order = self.documents
        for question, answer in others:
            order = tuple(shuffler.sample(order, len(order)))
            yield DemoRequest("another order", order, question, answer)
        changed = tuple(self.revised if each.id == self.revised.id else each for each in order)
        yield DemoRequest("one document changed", changed, *self.revised_question)
        order = tuple(shuffler.sample(self.documents, len(self.documents)))
        yield DemoRequest("exact prefix cache", order, *first, reuse="exact")
        yield DemoRequest("no reuse", order, *first, reuse="off")
        yield DemoRequest("the same, composed", order, *first)


def load_scenario(model: str) -> Scenario:
    """Read a model's questions in demo/documents and the files that they name."""
    content = json.loads((FOLDER / QUESTIONS[model]).read_text())
    revision = content["revision"]
    return Scenario(
        system=content["system"],
        documents=tuple(_read(entry["id"], entry["file"]) for entry in content["documents"]),
        questions=tuple((entry["question"], entry["answer"]) for entry in content["questions"]),
        revised=_read(revision["document"], revision["file"]),
        revised_question=(revision["question"], revision["answer"]),
        in_sentences=content.get("in_sentences", False),
    )


def _read(document_id: str, file: str) -> DemoDocument:
    title, _, text = (FOLDER / file).read_text().partition("\n")
    return DemoDocument(document_id, title, text.strip())
