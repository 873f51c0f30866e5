"""Values that the generator hands out."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Split(StrEnum):
    """Which names and countries may appear: no word of one split occurs in the other."""

    TRAIN = "train"
    TEST = "test"


class QuestionType(StrEnum):
    """The label of a question: what must be read to answer it."""

    ONE_FACT = "one_fact"
    TWO_DOCUMENTS = "two_documents"
    DEFINITION = "definition"
    PREVIOUS_DOCUMENT = "previous_document"
    OVERRIDE = "override"
    COMPARISON = "comparison"
    EDGE_FACT = "edge_fact"
    UNANSWERABLE = "unanswerable"


class Source(StrEnum):
    """Where the evidence of a question comes from."""

    FICTION = "fiction"
    FACTBOOK = "factbook"


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a prompt; neither field holds an ordinal."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Characters `[start, end)` of `documents[document].text` that hold a needed value."""

    document: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with its expected reply.

    `system` is empty when the prompt has no system message. `acceptable` holds `answer` and
    every other text that counts as right.
    """

    system: str
    documents: tuple[Document, ...]
    question: str
    answer: str
    acceptable: tuple[str, ...]
    type: QuestionType
    source: Source
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A question about a scene, apart from the scene's documents."""

    question: str
    answer: str
    acceptable: tuple[str, ...]
    type: QuestionType
    source: Source
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """A value that one document states of one thing."""

    thing: str
    kind: str
    attribute: str
    value: str
    evidence: Evidence
    at_edge: bool


@dataclass(frozen=True, slots=True)
class Scene:
    """Documents in prompt order and what they say.

    `absent` lists (thing, kind, attribute) that a reader could ask for in vain.
    `registers` holds, for each subject, its entries in prompt order.
    """

    system: str
    documents: tuple[Document, ...]
    facts: tuple[Fact, ...]
    notes: tuple[Fact, ...]
    classes: tuple[Fact, ...]
    registers: tuple[tuple[Fact, ...], ...]
    meanings: Mapping[str, str]
    absent: tuple[tuple[str, str, str], ...]
