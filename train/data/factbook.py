"""Sections of the CIA World Factbook (public domain) and questions from their fields."""

import functools
import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path

from train.data.types import Evidence, QuestionType, Source, Split, Turn

_HERE = Path(__file__).parent
TRAIN_FILE = _HERE / "cache" / "factbook.json"
TEST_FILE = _HERE / "factbook_test.json"
_TEST_SHARE = 8

ASK: dict[str, tuple[str, ...]] = {
    "Total area": ("What is the total area of {n}?", "How large is {n} in total?"),
    "Coastline": ("How long is the coastline of {n}?", "What is the length of the coast of {n}?"),
    "Highest point": ("What is the highest point of {n}?", "Which is the highest point in {n}?"),
    "Lowest point": ("What is the lowest point of {n}?", "Which is the lowest point in {n}?"),
    "Long form of the name": (
        "What is the conventional long form of the name of {n}?",
        "What is the full name of {n}?",
    ),
    "Government type": (
        "What type of government does {n} have?",
        "What is the government type of {n}?",
    ),
    "Capital": ("What is the capital of {n}?", "Which city is the capital of {n}?"),
    "Independence": ("When did {n} become independent?", "What is the independence date of {n}?"),
    "Population": ("What is the population of {n}?", "How many people live in {n}?"),
    "Nationality": ("What is the nationality noun of {n}?", "What is a citizen of {n} called?"),
    "Median age": ("What is the median age in {n}?", "How old is the median inhabitant of {n}?"),
    "Urban population": (
        "Which share of the population of {n} is urban?",
        "What is the urban population of {n}?",
    ),
    "Currency": ("What is the currency of {n}?", "Which currency is used in {n}?"),
    "Internet country code": (
        "What is the internet country code of {n}?",
        "Which internet country code does {n} have?",
    ),
    "Airports": ("How many airports does {n} have?", "What is the number of airports in {n}?"),
    "Exports": ("What is the value of the exports of {n}?", "How much does {n} export?"),
}


@dataclass(frozen=True, slots=True)
class SectionFact:
    """A field's value at characters `[start, end)` of the section's text."""

    field: str
    value: str
    start: int
    end: int
    at_edge: bool


@dataclass(frozen=True, slots=True)
class Section:
    """One section of one country's page, as a document."""

    country: str
    title: str
    text: str
    facts: tuple[SectionFact, ...]


def split_of_country(country: str) -> Split:
    """The only split in which a country's sections may appear."""
    return Split.TEST if zlib.crc32(country.encode()) % _TEST_SHARE == 0 else Split.TRAIN


@functools.cache
def load_sections(split: Split) -> tuple[Section, ...]:
    """All sections of a split; empty for training when the cache was never fetched."""
    path = TEST_FILE if split is Split.TEST else TRAIN_FILE
    if not path.exists():
        return ()
    rows = json.loads(path.read_text())
    return tuple(
        Section(
            row["country"],
            row["title"],
            row["text"],
            tuple(SectionFact(**fact) for fact in row["facts"]),
        )
        for row in rows
    )


def section_turns(rng: random.Random, section: Section, document: int) -> list[Turn]:
    """One question a fact of the section that stands at index `document` of the prompt."""
    return [
        Turn(
            question=rng.choice(ASK[fact.field]).replace("{n}", section.country),
            answer=fact.value,
            acceptable=(fact.value,),
            type=QuestionType.EDGE_FACT if fact.at_edge else QuestionType.ONE_FACT,
            source=Source.FACTBOOK,
            evidence=(Evidence(document, fact.start, fact.end),),
        )
        for fact in section.facts
    ]
