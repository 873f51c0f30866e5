"""The engine's greedy answers beside those of `transformers`, as rows and as a list of the questions that differ."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.results import Row, write_results

__all__ = ["ALL_TYPES", "Comparison", "Difference", "differences_path", "write_comparison"]

ALL_TYPES = "all"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first answer token, `place`, that the two choose differently, after the same tokens before it.

    engine_margin and oracle_margin: by how many nats each prefers its own token to the other's.
    """

    place: int
    engine_margin: float
    oracle_margin: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One question: both greedy answers as text, whether each is right, and where they part, None where they do not.

    deviation: the largest difference of a log-probability over the vocabulary, while the tokens are the same, in nats.
    """

    question: int
    type: str
    engine_answer: str
    oracle_answer: str
    engine_exact: bool
    oracle_exact: bool
    deviation: float
    difference: Difference | None


def differences_path(path: Path) -> Path:
    """Where the questions stand on which the two differ, beside the rows."""
    return path.with_name(f"{path.stem}_differences.json")


def write_comparison(path: Path, command: str, device: str, found: Sequence[Comparison]) -> str:
    """Write the rows and the differing questions; returns one line that says how many there are."""
    types = sorted({own.type for own in found})
    groups = {name: [own for own in found if own.type == name] for name in types}
    rows = [row for name, members in {ALL_TYPES: list(found), **groups}.items() for row in _rows(name, members)]
    deviation = max(own.deviation for own in found)
    write_results(path, command, device, [*rows, Row("largest deviation", deviation, "nats", None, "lower")])
    differing = [asdict(own) for own in found if own.difference is not None]
    differences_path(path).write_text(json.dumps(differing, indent=1, ensure_ascii=False) + "\n")
    return f"{len(found) - len(differing)} of {len(found)} answers are equal, log-probabilities within {deviation:.2e}"


def _rows(group: str, members: Sequence[Comparison]) -> list[Row]:
    count = len(members)
    equal = sum(own.difference is None for own in members)
    engine, oracle = (
        round(100 * sum(exact) / count, 3)
        for exact in zip(*((own.engine_exact, own.oracle_exact) for own in members), strict=True)
    )
    return [
        Row(f"{group} / questions", count, "questions"),
        Row(f"{group} / equal answers", equal, "questions", count),
        Row(f"{group} / exact match, engine", engine, "%"),
        Row(f"{group} / exact match, transformers", oracle, "%"),
    ]
