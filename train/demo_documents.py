"""Writes the documents and questions of the demo, from held-out countries and names.

python -m train.demo_documents --out demo/documents
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from train.data.asking import ASKERS
from train.data.factbook import Section, load_sections, section_turns
from train.data.names import NameSource
from train.data.scenes import SceneShape, build_scene
from train.data.types import Document, Fact, QuestionType, Scene, Split, Turn

_SEED = 4
_SYSTEM = "You answer questions from the documents. Give only the answer."
_SECTIONS = ("Mauritius: Government", "Cyprus: Geography", "Ghana: People and Society", "Botswana: Government")
_SECTION_FIELDS = ("Capital", "Highest point", "Population", "Independence")
_FICTION = SceneShape(documents=5, least_words=95, most_words=130)
_FICTION_TYPES = (QuestionType.TWO_DOCUMENTS, QuestionType.COMPARISON, QuestionType.ONE_FACT)


@dataclass(frozen=True, slots=True)
class DemoDocument:
    """A document's id and file; the file's first line is the title, the rest the text."""

    id: str
    file: str


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """A question, its expected reply, and the ids of the documents that it needs."""

    question: str
    answer: str
    type: str
    source: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Revision:
    """A changed version of one document and the question whose answer changes with it."""

    document: str
    file: str
    question: str
    answer: str
    answer_before: str


def demo_scene() -> Scene:
    """The fictional documents of the demo; no two of them depend on their order."""
    return build_scene(random.Random(f"demo/{_SEED}"), Split.TEST, _FICTION)


def demo_sections() -> list[Section]:
    """The Factbook sections of the demo."""
    by_title = {section.title: section for section in load_sections(Split.TEST)}
    return [by_title[title] for title in _SECTIONS]


def _identifier(title: str) -> str:
    return "-".join(title.lower().replace(":", "").split())


def _write(folder: Path, kind: str, name: str, document: Document) -> str:
    (folder / kind).mkdir(parents=True, exist_ok=True)
    (folder / kind / f"{name}.txt").write_text(f"{document.title}\n{document.text}\n")
    return f"{kind}/{name}.txt"


def _question(turn: Turn, titles: Sequence[str]) -> DemoQuestion:
    evidence = tuple(_identifier(titles[e.document]) for e in turn.evidence)
    return DemoQuestion(turn.question, turn.answer, turn.type.value, turn.source.value, evidence)


def _section_questions(rng: random.Random) -> list[DemoQuestion]:
    questions: list[DemoQuestion] = []
    for index, (section, field) in enumerate(zip(demo_sections(), _SECTION_FIELDS, strict=True)):
        turns = section_turns(rng, section, index)
        place = next(i for i, fact in enumerate(section.facts) if fact.field == field)
        questions.append(_question(turns[place], _SECTIONS))
    return questions


def _fiction_questions(rng: random.Random, scene: Scene) -> list[DemoQuestion]:
    titles = [d.title for d in scene.documents]
    return [_question(ASKERS[type_](rng, scene)[0], titles) for type_ in _FICTION_TYPES]


def _revised(rng: random.Random, scene: Scene, folder: Path) -> Revision:
    """Another person in the place of one that a single document names once."""
    fact = next(f for f in scene.facts if f.attribute in ("mayor", "director", "inventor", "mentor"))
    document = scene.documents[fact.evidence.document]
    turn = next(t for t in _turns_of(rng, scene, fact))
    name = NameSource(rng, Split.TEST).name("person")
    before, after = document.text[: fact.evidence.start], document.text[fact.evidence.end :]
    changed = Document(document.title, f"{before}{name}{after}")
    identifier = _identifier(document.title)
    file = _write(folder, "fiction", f"{identifier}-revised", changed)
    return Revision(identifier, file, turn.question, name, fact.value)


def _turns_of(rng: random.Random, scene: Scene, fact: Fact) -> list[Turn]:
    types = (QuestionType.ONE_FACT, QuestionType.EDGE_FACT)
    turns = [turn for type_ in types for turn in ASKERS[type_](rng, scene)]
    return [turn for turn in turns if turn.evidence == (fact.evidence,)]


def write_demo(folder: Path) -> None:
    """Writes the texts and `questions.json`."""
    rng, scene = random.Random(f"demo/questions/{_SEED}"), demo_scene()
    documents = [
        DemoDocument(_identifier(s.title), _write(folder, "factbook", _identifier(s.title), Document(s.title, s.text)))
        for s in demo_sections()
    ]
    documents += [
        DemoDocument(_identifier(d.title), _write(folder, "fiction", _identifier(d.title), d)) for d in scene.documents
    ]
    content = {
        "system": _SYSTEM,
        "documents": [asdict(d) for d in documents],
        "questions": [asdict(q) for q in (*_section_questions(rng), *_fiction_questions(rng, scene))],
        "revision": asdict(_revised(rng, scene, folder)),
    }
    (folder / "questions.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m train.demo_documents", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the demo's documents")
    write_demo(parser.parse_args().out)


if __name__ == "__main__":
    main()
