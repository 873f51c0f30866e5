"""Questions about a scene, one function a question type."""

import random
from collections.abc import Callable, Mapping, Sequence

from train.data.names import NameSource
from train.data.schema import ATTRIBUTES, CLASS, KINDS, NOTES, REGISTERS, Attribute
from train.data.types import Evidence, Fact, QuestionType, Scene, Source, Split, Turn

NO_ANSWER = "The documents do not say."


def _turn(
    type_: QuestionType,
    question: str,
    answer: str,
    evidence: Sequence[Evidence],
    acceptable: Sequence[str] = (),
) -> Turn:
    texts = tuple(dict.fromkeys((answer, *acceptable)))
    return Turn(question, answer, texts, type_, Source.FICTION, tuple(evidence))


def _ask(rng: random.Random, attribute: Attribute, name: str) -> str:
    return rng.choice(attribute.ask).replace("{n}", name)


def _one_fact(rng: random.Random, scene: Scene) -> list[Turn]:
    return _single(rng, scene, QuestionType.ONE_FACT, at_edge=False)


def _edge_fact(rng: random.Random, scene: Scene) -> list[Turn]:
    return _single(rng, scene, QuestionType.EDGE_FACT, at_edge=True)


def _single(rng: random.Random, scene: Scene, type_: QuestionType, *, at_edge: bool) -> list[Turn]:
    return [
        _turn(type_, _ask(rng, ATTRIBUTES[f.kind][f.attribute], f.thing), f.value, [f.evidence])
        for f in scene.facts
        if f.at_edge is at_edge
    ]


def _two_documents(rng: random.Random, scene: Scene) -> list[Turn]:
    by_thing: dict[str, list[Fact]] = {}
    for fact in scene.facts:
        by_thing.setdefault(fact.thing, []).append(fact)
    turns: list[Turn] = []
    for first in scene.facts:
        noun = ATTRIBUTES[first.kind][first.attribute].noun
        if not noun or first.value not in by_thing:
            continue
        second = rng.choice(by_thing[first.value])
        attribute = ATTRIBUTES[second.kind][second.attribute]
        question = _ask(rng, attribute, noun.replace("{n}", first.thing))
        answer = attribute.reply.replace("{n}", first.value).replace("{v}", second.value)
        evidence = [first.evidence, second.evidence]
        short = (second.value,)
        turns.append(_turn(QuestionType.TWO_DOCUMENTS, question, answer, evidence, short))
    return turns


def _definition(rng: random.Random, scene: Scene) -> list[Turn]:
    return [
        _turn(
            QuestionType.DEFINITION,
            _ask(rng, CLASS, fact.thing),
            f"{fact.value}: {scene.meanings[fact.value]}",
            [fact.evidence],
            (scene.meanings[fact.value],),
        )
        for fact in scene.classes
    ]


def _previous_document(rng: random.Random, scene: Scene) -> list[Turn]:
    return [
        _turn(
            QuestionType.PREVIOUS_DOCUMENT,
            _ask(rng, NOTES[fact.kind], fact.thing),
            fact.value,
            [fact.evidence],
        )
        for fact in scene.notes
    ]


def _override(rng: random.Random, scene: Scene) -> list[Turn]:
    return [
        _turn(
            QuestionType.OVERRIDE,
            _ask(rng, REGISTERS[entries[-1].attribute], entries[-1].thing),
            entries[-1].value,
            [entries[-1].evidence],
        )
        for entries in scene.registers
    ]


def _comparison(rng: random.Random, scene: Scene) -> list[Turn]:
    groups: dict[tuple[str, str], list[Fact]] = {}
    for fact in scene.facts:
        if ATTRIBUTES[fact.kind][fact.attribute].compare:
            groups.setdefault((fact.kind, fact.attribute), []).append(fact)
    turns: list[Turn] = []
    for (kind, key), facts in groups.items():
        if len(facts) < 2:
            continue
        a, b = rng.sample(facts, 2)
        if a.value == b.value:
            continue
        attribute = ATTRIBUTES[kind][key]
        best = min if attribute.wins == "min" else max
        winner = best((a, b), key=lambda fact: int(fact.value)).thing
        question = rng.choice(attribute.compare).replace("{a}", a.thing).replace("{b}", b.thing)
        answer = f"{a.value} and {b.value}: {winner}"
        evidence = [a.evidence, b.evidence]
        turns.append(_turn(QuestionType.COMPARISON, question, answer, evidence, (winner,)))
    return turns


def _unanswerable(rng: random.Random, scene: Scene) -> list[Turn]:
    rows = list(scene.absent)
    rng.shuffle(rows)
    turns = [
        _turn(QuestionType.UNANSWERABLE, _ask(rng, ATTRIBUTES[kind][key], name), NO_ANSWER, ())
        for name, kind, key in rows[:4]
    ]
    return turns


def stranger(rng: random.Random, split: Split) -> Turn:
    """A question about a thing that no document mentions."""
    kind = rng.choice(KINDS)
    attribute = rng.choice(list(ATTRIBUTES[kind].values()))
    name = NameSource(rng, split).name(kind)
    return _turn(QuestionType.UNANSWERABLE, _ask(rng, attribute, name), NO_ANSWER, ())


ASKERS: Mapping[QuestionType, Callable[[random.Random, Scene], list[Turn]]] = {
    QuestionType.ONE_FACT: _one_fact,
    QuestionType.TWO_DOCUMENTS: _two_documents,
    QuestionType.DEFINITION: _definition,
    QuestionType.PREVIOUS_DOCUMENT: _previous_document,
    QuestionType.OVERRIDE: _override,
    QuestionType.COMPARISON: _comparison,
    QuestionType.EDGE_FACT: _edge_fact,
    QuestionType.UNANSWERABLE: _unanswerable,
}
