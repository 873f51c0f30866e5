"""Builds scenes: documents in prompt order about fictional things that know each other."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from train.data.factbook import Section
from train.data.names import NameSource
from train.data.schema import ATTRIBUTES, CLASS, KINDS, NOTES, PROSE, REGISTERS, Attribute
from train.data.types import Document, Evidence, Fact, Scene, Split
from train.data.writing import (
    Statement,
    Text,
    capitalised,
    draw_value,
    write_statement,
    write_thing,
)


@dataclass(frozen=True, slots=True)
class SceneShape:
    """How many documents a scene holds and how many words each runs to.

    `notes` counts documents about the one before them, `registers` pairs of entries on one
    subject, `classes` the definitions in the system prompt.
    """

    documents: int
    least_words: int
    most_words: int
    notes: int = 0
    registers: int = 0
    classes: int = 0
    with_system: bool = True


@dataclass(frozen=True, slots=True)
class _Thing:
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class _Draft:
    """A document before its place in the prompt is known."""

    title: str
    text: Text
    thing: _Thing
    role: str


def build_scene(rng: random.Random, split: Split, shape: SceneShape, sections: Sequence[Section] = ()) -> Scene:
    """A scene of `shape.documents` documents, of which `sections` are real texts."""
    names = NameSource(rng, split)
    count = shape.documents - shape.notes - 2 * shape.registers - len(sections)
    things = [_new_thing(rng, names) for _ in range(count)]
    meanings = _meanings(rng, shape.classes)
    units = [[_thing_draft(rng, names, t, things, meanings, shape)] for t in things]
    absent = tuple(key for unit in units for key in _absent(unit[0]))
    for unit in rng.sample(units, min(shape.notes, len(units))):
        unit.append(_note_draft(rng, names, unit[0].thing, shape))
    units += [[draft] for _ in range(shape.registers) for draft in _register(rng, names, shape)]
    units += [[_section_draft(section)] for section in sections]
    rng.shuffle(units)
    drafts = [draft for unit in units for draft in unit]
    return _scene(_system(rng, meanings, shape), drafts, meanings, absent)


def _new_thing(rng: random.Random, names: NameSource) -> _Thing:
    kind = rng.choice(KINDS)
    return _Thing(kind, names.name(kind))


def _words(rng: random.Random, shape: SceneShape) -> int:
    return int(rng.triangular(shape.least_words, shape.most_words, shape.least_words))


def _meanings(rng: random.Random, count: int) -> dict[str, str]:
    classes = rng.sample(PROSE.values["class"], count)
    return dict(zip(classes, rng.sample(PROSE.values["meaning"], count), strict=True))


def _value(
    rng: random.Random,
    names: NameSource,
    attribute: Attribute,
    owner: _Thing,
    things: Sequence[_Thing],
) -> str:
    if attribute.noun and rng.random() < 0.6:
        known = [t.name for t in things if t.kind == attribute.value and t != owner]
        if known:
            return rng.choice(known)
    return draw_value(rng, names, attribute.value)


def _thing_draft(
    rng: random.Random,
    names: NameSource,
    thing: _Thing,
    things: Sequence[_Thing],
    meanings: dict[str, str],
    shape: SceneShape,
) -> _Draft:
    words = _words(rng, shape)
    table = list(ATTRIBUTES[thing.kind].values())
    count = max(2, min(words // 12 + rng.randint(-1, 2), len(table) - 1))
    chosen = rng.sample(table, count)
    statements = [Statement(a, _value(rng, names, a, thing, things)) for a in chosen]
    if meanings and rng.random() < 0.6:
        statements.append(Statement(CLASS, rng.choice(list(meanings))))
        rng.shuffle(statements)
    text = write_thing(rng, names, thing.kind, thing.name, statements, words)
    return _Draft(capitalised(thing.name), text, thing, "thing")


def _absent(draft: _Draft) -> list[tuple[str, str, str]]:
    stated = {w.statement.attribute.key for w in draft.text.written}
    thing = draft.thing
    return [(thing.name, thing.kind, key) for key in ATTRIBUTES[thing.kind] if key not in stated]


def _note_draft(rng: random.Random, names: NameSource, thing: _Thing, shape: SceneShape) -> _Draft:
    attribute = NOTES[thing.kind]
    statement = Statement(attribute, draw_value(rng, names, attribute.value))
    text = write_statement(rng, names, "note", thing.name, statement, _words(rng, shape))
    return _Draft(rng.choice(PROSE.titles["note"]), text, thing, "note")


def _register(rng: random.Random, names: NameSource, shape: SceneShape) -> list[_Draft]:
    thing = _new_thing(rng, names)
    attribute = rng.choice(list(REGISTERS.values()))
    drafts: list[_Draft] = []
    values: set[str] = set()
    while len(drafts) < 2:
        value = draw_value(rng, names, attribute.value)
        if value in values:
            continue
        values.add(value)
        statement = Statement(attribute, value)
        words = _words(rng, shape)
        text = write_statement(rng, names, "register", thing.name, statement, words)
        title = rng.choice(PROSE.titles["register"]).replace("{n}", thing.name)
        drafts.append(_Draft(title, text, thing, "register"))
    return drafts


def _section_draft(section: Section) -> _Draft:
    return _Draft(section.title, Text(section.text, ()), _Thing("country", section.country), "")


def _system(rng: random.Random, meanings: dict[str, str], shape: SceneShape) -> str:
    if not shape.with_system and not meanings:
        return ""
    parts = [rng.choice(PROSE.system["opening"])]
    for name, meaning in meanings.items():
        parts.append(rng.choice(PROSE.define).replace("{c}", name).replace("{m}", meaning))
    if rng.random() < 0.5:
        parts.append(rng.choice(PROSE.system["closing"]))
    return " ".join(parts)


def _scene(
    system: str,
    drafts: Sequence[_Draft],
    meanings: dict[str, str],
    absent: tuple[tuple[str, str, str], ...],
) -> Scene:
    facts: dict[str, list[Fact]] = {"thing": [], "class": [], "note": [], "register": []}
    for index, draft in enumerate(drafts):
        for written in draft.text.written:
            statement = written.statement
            role = "class" if statement.attribute is CLASS else draft.role
            evidence = Evidence(index, written.start, written.end)
            thing, key = draft.thing, statement.attribute.key
            facts[role].append(Fact(thing.name, thing.kind, key, statement.value, evidence, written.at_edge))
    subjects = dict.fromkeys(fact.thing for fact in facts["register"])
    return Scene(
        system=system,
        documents=tuple(Document(d.title, d.text.text) for d in drafts),
        facts=tuple(facts["thing"]),
        notes=tuple(facts["note"]),
        classes=tuple(facts["class"]),
        registers=tuple(tuple(f for f in facts["register"] if f.thing == subject) for subject in subjects),
        meanings=meanings,
        absent=absent,
    )
