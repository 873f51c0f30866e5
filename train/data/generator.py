"""Questions for evaluation, from a seed."""

import random
from collections.abc import Iterator, Sequence

from train.data.asking import ASKERS, stranger
from train.data.factbook import Section, load_sections, section_turns
from train.data.scenes import SceneShape, build_scene
from train.data.types import Question, QuestionType, Scene, Split, Turn

_STRANGER_SHARE = 0.4
_LONG_DOCUMENTS = 8


def questions(
    seed: int,
    count: int,
    split: str | Split = Split.TEST,
    *,
    types: Sequence[QuestionType] = tuple(QuestionType),
    long_documents: bool = False,
    factbook_share: float = 0.1,
) -> Iterator[Question]:
    """`count` prompts with one question each, the same ones for the same arguments.

    Prompts hold 8 to 16 documents of about 60 to 300 tokens; with `long_documents` 8 documents
    of 400 tokens and more, all fictional. The types take turns; a `factbook_share` of the
    questions asks instead about a section of the World Factbook among fictional documents.
    """
    split = Split(split)
    sections = () if long_documents else load_sections(split)
    for index in range(count):
        rng = random.Random(f"{seed}/{split}/{index}/{long_documents}")
        if sections and rng.random() < factbook_share:
            yield _factbook_question(rng, split, sections)
        else:
            yield _fiction_question(rng, split, types[index % len(types)], long_documents)


def _shape(rng: random.Random, long_documents: bool) -> SceneShape:
    if long_documents:
        least, most, documents = 292, 296, _LONG_DOCUMENTS
    else:
        documents = rng.randint(8, 16)
        least, most = 38, rng.randint(60, 150 if documents > 12 else 240)
    return SceneShape(
        documents=documents,
        least_words=least,
        most_words=most,
        notes=rng.randint(0, 2),
        registers=rng.randint(0, 1),
        classes=rng.choice((0, 0, 3, 4)),
        with_system=rng.random() < 0.8,
    )


def _shape_for(rng: random.Random, type_: QuestionType, long_documents: bool) -> SceneShape:
    """A shape that can hold a question of the type: at least what the type is about."""
    while True:
        shape = _shape(rng, long_documents)
        lacks_notes = type_ is QuestionType.PREVIOUS_DOCUMENT and shape.notes == 0
        lacks_registers = type_ is QuestionType.OVERRIDE and shape.registers == 0
        lacks_classes = type_ is QuestionType.DEFINITION and shape.classes == 0
        if not (lacks_notes or lacks_registers or lacks_classes):
            return shape


def _fiction_question(rng: random.Random, split: Split, type_: QuestionType, long_documents: bool) -> Question:
    while True:
        scene = build_scene(rng, split, _shape_for(rng, type_, long_documents))
        if type_ is QuestionType.UNANSWERABLE and rng.random() < _STRANGER_SHARE:
            return _question(scene, stranger(rng, split))
        turns = ASKERS[type_](rng, scene)
        if turns:
            return _question(scene, rng.choice(turns))


def _factbook_question(rng: random.Random, split: Split, sections: Sequence[Section]) -> Question:
    while True:
        chosen = rng.sample(sections, rng.randint(2, 5))
        scene = build_scene(rng, split, _shape(rng, long_documents=False), chosen)
        section = rng.choice(chosen)
        place = next(i for i, d in enumerate(scene.documents) if d.title == section.title)
        turns = section_turns(rng, section, place)
        if turns:
            return _question(scene, rng.choice(turns))


def _question(scene: Scene, turn: Turn) -> Question:
    return Question(
        system=scene.system,
        documents=scene.documents,
        question=turn.question,
        answer=turn.answer,
        acceptable=turn.acceptable,
        type=turn.type,
        source=turn.source,
        evidence=turn.evidence,
    )
