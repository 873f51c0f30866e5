"""Turns facts into a document's text and keeps track of where each value stands."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from train.data.names import NameSource
from train.data.schema import ATTRIBUTES, KINDS, PROSE, Attribute

_RANGES = {
    "year": (1702, 1998),
    "population": (10000, 99999),
    "elevation": (101, 999),
    "employees": (1001, 9999),
    "weight": (11, 99),
    "price": (101, 999),
}
_NAMED = {"person", "place", "organisation", "river"}
_DISTRACTOR_OPENINGS = ("For comparison: ", "A different source adds: ", "An unrelated list says: ")


@dataclass(frozen=True, slots=True)
class Statement:
    """An attribute of the document's thing with its value."""

    attribute: Attribute
    value: str


@dataclass(frozen=True, slots=True)
class Written:
    """A statement's place in the text; `at_edge` marks the first and the last sentence."""

    statement: Statement
    start: int
    end: int
    at_edge: bool


@dataclass(frozen=True, slots=True)
class Text:
    """A document's text with its written statements in order."""

    text: str
    written: tuple[Written, ...]


def draw_value(rng: random.Random, names: NameSource, value: str) -> str:
    """A random value of the named sort."""
    if value in _RANGES:
        return str(rng.randint(*_RANGES[value]))
    if value in _NAMED:
        return names.name(value)
    return rng.choice(PROSE.values[value])


def capitalised(sentence: str) -> str:
    """The sentence with a capital first letter."""
    return sentence[0].upper() + sentence[1:]


@dataclass(frozen=True, slots=True)
class _Sentence:
    text: str
    statement: Statement | None = None
    offset: int = 0


def _state(template: str, subject: str, statement: Statement) -> _Sentence:
    before, after = template.replace("{n}", subject).split("{v}")
    text = capitalised(f"{before}{statement.value}{after}")
    return _Sentence(text, statement, len(before))


def _distractor(rng: random.Random, names: NameSource) -> _Sentence:
    kind = rng.choice(KINDS)
    attribute = rng.choice(list(ATTRIBUTES[kind].values()))
    statement = Statement(attribute, draw_value(rng, names, attribute.value))
    sentence = _state(rng.choice(attribute.say), names.name(kind), statement)
    return _Sentence(rng.choice(_DISTRACTOR_OPENINGS) + sentence.text)


def _padding(rng: random.Random, names: NameSource, kind: str, words: int) -> list[_Sentence]:
    fillers = list(PROSE.filler[kind] + PROSE.filler["general"])
    rng.shuffle(fillers)
    padding: list[_Sentence] = []
    while words > 0:
        if fillers and rng.random() < 0.75:
            padding.append(_Sentence(fillers.pop()))
        else:
            padding.append(_distractor(rng, names))
        words -= padding[-1].text.count(" ") + 1
    return padding


def _subject(rng: random.Random, kind: str, name: str) -> str:
    return name if rng.random() < 0.5 else rng.choice(PROSE.pronoun[kind])


def write_thing(
    rng: random.Random,
    names: NameSource,
    kind: str,
    name: str,
    statements: Sequence[Statement],
    words: int,
) -> Text:
    """A text of about `words` words that states all `statements` of the named thing.

    The first sentence states the first of them under the thing's full name.
    """
    first, *rest = statements
    stated = [_state(rng.choice(s.attribute.say), _subject(rng, kind, name), s) for s in rest]
    opening = _state(rng.choice(first.attribute.say), name, first)
    spent = sum(s.text.count(" ") + 1 for s in (opening, *stated))
    middle = stated + _padding(rng, names, kind, words - spent)
    rng.shuffle(middle)
    return join([opening, *middle])


def join(sentences: Sequence[_Sentence]) -> Text:
    """Joins sentences with blanks; a statement's offsets count from the text's start."""
    position = 0
    written: list[Written] = []
    for index, sentence in enumerate(sentences):
        if sentence.statement is not None:
            start = position + sentence.offset
            end = start + len(sentence.statement.value)
            at_edge = index in (0, len(sentences) - 1)
            written.append(Written(sentence.statement, start, end, at_edge))
        position += len(sentence.text) + 1
    return Text(" ".join(s.text for s in sentences), tuple(written))


def write_statement(
    rng: random.Random,
    names: NameSource,
    role: str,
    name: str,
    statement: Statement,
    words: int,
) -> Text:
    """A text of about `words` words around one statement: a `note` or a `register` entry."""
    stated = _state(rng.choice(statement.attribute.say), name, statement)
    sentences = _padding(rng, names, role, max(6, words - stated.text.count(" ")))
    sentences.insert(rng.randint(0, min(2, len(sentences))), stated)
    return join(sentences)
