"""Documents that state facts, with versions: every version of a document states other values, so that an answer says from which
version it was read.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from eval.live.questions import normalise
from train.data.names import NameSource
from train.data.scenes import SceneShape, build_scene
from train.data.schema import ATTRIBUTES
from train.data.types import Fact, Split
from train.data.writing import draw_value

__all__ = ["Asked", "FactLibrary", "Verdict", "judge"]

_MAX_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, or where `body` is None a document that has changed. others: what other versions say; due: in seconds."""

    due: float
    document: str
    body: dict[str, Any] | None = None
    answer: str = ""
    others: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Verdict:
    """is_stale: the reply is what another version of the document says, which the request did not bring."""

    is_right: bool
    is_stale: bool


def judge(asked: Asked, reply: str) -> Verdict:
    """Case, spaces and a full stop at the end do not count."""
    said = normalise(reply)
    return Verdict(said == normalise(asked.answer), said in map(normalise, asked.others))


class FactLibrary:
    """Scenes of `documents` documents each, asked about by Zipf's law; a question brings all documents of its scene, shuffled."""

    def __init__(self, seed: int, scenes: int, documents: int = 8) -> None:
        self._seed = seed
        shape = SceneShape(documents, least_words=60, most_words=110, with_system=True)
        self._scenes = [
            build_scene(random.Random(f"{seed}/scene/{index}"), Split.TEST, shape) for index in range(scenes)
        ]
        self._versions = [[0] * len(scene.documents) for scene in self._scenes]
        self._ranks = list(accumulate(1 / (rank + 1) for rank in range(scenes)))

    def ask(self, rate: float, count: int, updates_per_second: float) -> list[Asked]:
        """So many questions at a rate, and the documents that change in between; by time. Goes on from the last call's end."""
        return list(self._events(random.Random(f"{self._seed}/events"), rate, count, updates_per_second))

    def _events(self, source: random.Random, rate: float, count: int, updates: float) -> Iterator[Asked]:
        due = 0.0
        change = source.expovariate(updates) if updates else float("inf")
        for number in range(count):
            due += source.expovariate(rate)
            while change < due:
                yield self._change(source, change)
                change += source.expovariate(updates)
            yield self._question(source, due, number)

    def _change(self, source: random.Random, due: float) -> Asked:
        scene = source.choices(range(len(self._scenes)), cum_weights=self._ranks)[0]
        document = source.randrange(len(self._versions[scene]))
        self._versions[scene][document] += 1
        return Asked(due, f"scene-{scene}-{document}")

    def _question(self, source: random.Random, due: float, number: int) -> Asked:
        index = source.choices(range(len(self._scenes)), cum_weights=self._ranks)[0]
        scene, versions = self._scenes[index], self._versions[index]
        fact = source.choice(scene.facts)
        place, version = fact.evidence.document, versions[fact.evidence.document]
        order = source.sample(range(len(scene.documents)), len(scene.documents))
        question = source.choice(ATTRIBUTES[fact.kind][fact.attribute].ask).replace("{n}", fact.thing)
        system = [{"role": "system", "content": scene.system}] if scene.system else []
        body = {
            "messages": [*system, {"role": "user", "content": question}],
            "documents": [self._document(index, own, versions[own]) for own in order],
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = self._value(index, fact, version)
        others = {self._value(index, fact, other) for other in range(version + 2)} - {answer}
        return Asked(due, f"scene-{index}-{place}", body, answer, frozenset(others))

    def _document(self, scene: int, place: int, version: int) -> dict[str, str]:
        document = self._scenes[scene].documents[place]
        text = document.text
        facts = [own for own in self._scenes[scene].facts if own.evidence.document == place]
        for fact in sorted(facts, key=lambda own: own.evidence.start, reverse=True):
            value = self._value(scene, fact, version)
            text = text[: fact.evidence.start] + value + text[fact.evidence.end :]
        return {"id": f"scene-{scene}-{place}", "title": document.title, "text": text}

    def _value(self, scene: int, fact: Fact, version: int) -> str:
        """Version 0 is as the scene was written."""
        if not version:
            return fact.value
        source = random.Random(f"{self._seed}/{scene}/{fact.thing}/{fact.attribute}/{version}")
        return draw_value(source, NameSource(source, Split.TEST), ATTRIBUTES[fact.kind][fact.attribute].value)
