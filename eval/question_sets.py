"""Which questions an evaluation asks: the generator's standard ones, and sets on which documents lean on each other."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from train.data import Document, Evidence, Question, QuestionType, Source, Split, questions
from train.data.asking import ASKERS
from train.data.scenes import SceneShape, build_scene

__all__ = ["QuestionSet", "SetKind", "read_questions"]

_PASSAGES = 16
_MIN_PASSAGE_CHARACTERS = 80


class SetKind(StrEnum):
    """What the documents are.

    standard: 8 to 16 of 60 to 300 tokens; long: 8 of 400 tokens and more; references: 16, many of which speak of the
    document before them or override an earlier one; passages: 8 cut in two as a retrieval system cuts them, so that the
    second half names its subject by pronoun.
    """

    STANDARD = "standard"
    LONG = "long"
    REFERENCES = "references"
    PASSAGES = "passages"


# Numbers of questions of different kinds never meet.
_NUMBERS_A_KIND = 100_000


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """`count` questions of a kind from a seed."""

    kind: SetKind
    count: int
    seed: int

    @property
    def numbers(self) -> range:
        """The questions' numbers, the same whatever other sets run beside them."""
        first = list(SetKind).index(self.kind) * _NUMBERS_A_KIND
        return range(first, first + self.count)


def read_questions(chosen: QuestionSet) -> Iterator[Question]:
    """The questions of a set, always the same ones."""
    if chosen.kind is SetKind.REFERENCES:
        return (_referring(chosen.seed, index) for index in range(chosen.count))
    if chosen.kind is SetKind.PASSAGES:
        types = [kind for kind in QuestionType if kind is not QuestionType.PREVIOUS_DOCUMENT]
        whole = questions(chosen.seed, chosen.count, types=types, factbook_share=0.0)
        return (_cut(question) for question in whole)
    return questions(chosen.seed, chosen.count, long_documents=chosen.kind is SetKind.LONG)


def _referring(seed: int, index: int) -> Question:
    kinds = (QuestionType.PREVIOUS_DOCUMENT, QuestionType.OVERRIDE, QuestionType.TWO_DOCUMENTS, QuestionType.COMPARISON)
    kind = kinds[index % len(kinds)]
    rng = random.Random(f"references/{seed}/{index}")
    shape = SceneShape(documents=16, least_words=38, most_words=110, notes=5, registers=2)
    while True:
        scene = build_scene(rng, Split.TEST, shape)
        turns = ASKERS[kind](rng, scene)
        if turns:
            turn = rng.choice(turns)
            return Question(
                scene.system,
                scene.documents,
                turn.question,
                turn.answer,
                turn.acceptable,
                turn.type,
                Source.FICTION,
                turn.evidence,
            )


def _cut(question: Question) -> Question:
    """Eight documents, those with the evidence among them, each cut at a sentence's end near its middle."""
    kept = _keep(question)
    documents: list[Document] = []
    places: dict[int, tuple[int, int]] = {}
    for index in kept:
        document = question.documents[index]
        middle = _sentence_end(document.text)
        places[index] = (len(documents), middle)
        if not middle:
            documents.append(document)
            continue
        documents += [Document(document.title, document.text[:middle]), Document("", document.text[middle + 1 :])]
    evidence = tuple(_moved(own, *places[own.document]) for own in question.evidence)
    return replace(question, documents=tuple(documents), evidence=evidence)


def _keep(question: Question) -> Sequence[int]:
    needed = {own.document for own in question.evidence}
    others = [index for index in range(len(question.documents)) if index not in needed]
    return sorted(needed | set(others[: _PASSAGES // 2 - len(needed)]))


def _sentence_end(text: str) -> int:
    """The place of the blank behind the sentence that ends nearest to the middle; 0 where the text is too short."""
    ends = [place + 1 for place, (first, second) in enumerate(pairwise(text)) if first == "." and second == " "]
    ends = [end for end in ends if _MIN_PASSAGE_CHARACTERS <= end <= len(text) - _MIN_PASSAGE_CHARACTERS]
    return min(ends, key=lambda end: abs(end - len(text) / 2), default=0)


def _moved(evidence: Evidence, first: int, middle: int) -> Evidence:
    if not middle or evidence.end <= middle:
        return replace(evidence, document=first)
    return Evidence(first + 1, evidence.start - middle - 1, evidence.end - middle - 1)
