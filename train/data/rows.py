"""Training rows: scenes filled up with questions, of one length a batch."""

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from train.data.asking import ASKERS, stranger
from train.data.factbook import load_sections, section_turns
from train.data.prompts import PromptEncoder, document_text
from train.data.scenes import SceneShape, build_scene
from train.data.types import QuestionType, Scene, Split, Turn

ROW_LENGTHS = (512, 1024, 2048, 4096)
_TOKENS_PER_WORD = 1.7
_LOOSE_SHARE = 0.06
_CUT_SHARE = 0.12
_FACTBOOK_SHARE = 0.2
_WEIGHTS = {
    QuestionType.ONE_FACT: 0.20,
    QuestionType.EDGE_FACT: 0.10,
    QuestionType.TWO_DOCUMENTS: 0.24,
    QuestionType.DEFINITION: 0.10,
    QuestionType.PREVIOUS_DOCUMENT: 0.12,
    QuestionType.OVERRIDE: 0.10,
    QuestionType.COMPARISON: 0.12,
    QuestionType.UNANSWERABLE: 0.07,
}


@dataclass(frozen=True, slots=True)
class Row:
    """`ids[length]` and, of the same length, 1 where the token belongs to a reply."""

    ids: NDArray[np.uint16]
    is_reply: NDArray[np.uint8]


@dataclass(slots=True)
class _Tape:
    ids: list[int]
    is_reply: list[int]

    def add(self, ids: list[int], is_reply: int) -> None:
        self.ids += ids
        self.is_reply += [is_reply] * len(ids)


def build_row(rng: random.Random, encoder: PromptEncoder, length: int, ease: float) -> Row:
    """A row of exactly `length` tokens; `ease` in [0, 1] lowers the number of documents."""
    tape = _Tape([], [])
    while len(tape.ids) < length:
        if tape.ids:
            tape.add([encoder.end_of_text], 0)
        room = length - len(tape.ids)
        if rng.random() < _LOOSE_SHARE:
            _add_loose_text(rng, encoder, tape, room)
        else:
            _add_scene(rng, encoder, tape, room, ease)
    ids = np.array(tape.ids[:length], dtype=np.uint16)
    return Row(ids, np.array(tape.is_reply[:length], dtype=np.uint8))


def _shape(rng: random.Random, room: int, ease: float) -> SceneShape:
    most = max(2, min(16, round(room / 110 * (1 - 0.6 * ease))))
    least = max(1, min(8, most // 2))
    documents = rng.randint(least, most)
    words = room * rng.uniform(0.45, 0.85) / documents / _TOKENS_PER_WORD
    registers = int(documents >= 4 and rng.random() < 0.5)
    free = documents - 2 * registers
    return SceneShape(
        documents=documents,
        least_words=max(26, min(290, int(0.6 * words))),
        most_words=max(40, min(310, int(1.7 * words))),
        notes=min(rng.choice((0, 1, 1, 2, 3)), free // 3 if free >= 3 else free // 2),
        registers=registers,
        classes=rng.choice((0, 0, 2, 3, 4)),
        with_system=rng.random() < 0.75,
    )


def _add_loose_text(rng: random.Random, encoder: PromptEncoder, tape: _Tape, room: int) -> None:
    """Documents without a prompt around them, begun and ended anywhere."""
    scene = build_scene(rng, Split.TRAIN, _shape(rng, room, ease=0.0))
    contents = encoder.client([document_text(d) for d in scene.documents])
    wrapped = rng.random() < 0.7
    ids: list[int] = []
    for content in contents:
        ids += encoder.document(content) if wrapped else [*content, encoder.end_of_text]
    tape.add(ids[rng.randint(0, len(contents[0])) : rng.randint(len(ids) // 2, len(ids))], 0)


def _add_scene(rng: random.Random, encoder: PromptEncoder, tape: _Tape, room: int, ease: float) -> None:
    shape = _shape(rng, room, ease)
    things = shape.documents - shape.notes - 2 * shape.registers
    sections = load_sections(Split.TRAIN)
    chosen = []
    if sections and rng.random() < _FACTBOOK_SHARE:
        chosen = rng.sample(sections, rng.randint(1, min(6, things)))
    scene = build_scene(rng, Split.TRAIN, shape, chosen)
    pools = _turn_pools(rng, scene)
    by_title = {d.title: i for i, d in enumerate(scene.documents)}
    for section in chosen:
        for turn in section_turns(rng, section, by_title[section.title]):
            pools[turn.type].append(turn)
    start = len(tape.ids)
    tape.add(encoder.opening(scene.system), 0)
    opening = len(tape.ids)
    ends: list[int] = []
    for content in encoder.client([document_text(d) for d in scene.documents]):
        tape.add(encoder.document(content), 0)
        ends.append(len(tape.ids))
    cut = rng.random() < _CUT_SHARE and len(ends) > 2
    if cut:
        first_whole = _cut_head(rng, tape, start, opening, ends)
        pools = _without_documents(pools, first_whole)
    _add_turns(rng, encoder, tape, room - (len(tape.ids) - start), pools)


def _cut_head(rng: random.Random, tape: _Tape, start: int, opening: int, ends: list[int]) -> int:
    """Drops a random head of the scene; returns the index of the first untouched document."""
    cut_document = rng.randint(0, len(ends) // 2)
    lower = ends[cut_document - 1] if cut_document else opening
    cut = rng.randint(lower, ends[cut_document] - 1)
    del tape.ids[start:cut]
    del tape.is_reply[start:cut]
    return cut_document + 1


_Pools = dict[QuestionType, list[Turn]]


def _turn_pools(rng: random.Random, scene: Scene) -> _Pools:
    pools = {type_: ask(rng, scene) for type_, ask in ASKERS.items()}
    pools[QuestionType.UNANSWERABLE] += [stranger(rng, Split.TRAIN) for _ in range(2)]
    return pools


def _without_documents(pools: _Pools, first_whole: int) -> _Pools:
    """Keeps turns whose evidence stands wholly behind the cut, the document before it too."""
    kept = {
        type_: [t for t in turns if t.evidence and all(e.document > first_whole for e in t.evidence)]
        for type_, turns in pools.items()
    }
    kept[QuestionType.DEFINITION] = []
    return kept


def _add_turns(rng: random.Random, encoder: PromptEncoder, tape: _Tape, room: int, pools: _Pools) -> None:
    turns = _draw_turns(rng, pools, most=room // 14 + 1)
    texts = [text for turn in turns for text in (turn.question, turn.answer)]
    pieces = encoder.client(texts)
    for index in range(0, len(pieces), 2):
        if index:
            tape.add(encoder.next_user[1:], 0)
        tape.add(pieces[index] + encoder.reply_open, 0)
        tape.add([*pieces[index + 1], encoder.message_end], 1)


def _draw_turns(rng: random.Random, pools: _Pools, most: int) -> list[Turn]:
    for turns in pools.values():
        rng.shuffle(turns)
    drawn: list[Turn] = []
    while len(drawn) < most:
        types = [type_ for type_, turns in pools.items() if turns]
        if not types:
            break
        type_ = rng.choices(types, [_WEIGHTS[t] for t in types])[0]
        drawn.append(pools[type_].pop())
    return drawn
