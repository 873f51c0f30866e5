"""`python -m bench.families --out FILE`: how exact every family is, and how far off the classical mistakes would be.

Needs the development extra and runs from the repository: models, references and mistakes are those of tests/exactness.
Errors are the largest difference over the largest expected logit of a position. Exits with 1 where one misses its reach.
"""

import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.results import Row, write_results
from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from tests.exactness.mistakes import Mistake, edit_record, possible_mistakes
from tests.exactness.reference_model import Part, Record, ReferenceModel
from tests.exactness.rig import TOLERANCE, PassRig, create_context, draw_ids, relative_error
from tests.models import VARIANTS, CheckpointFactory, Variant, reference_logits

_PROMPT = draw_ids(200, 1)
_PRIME, _SYSTEM, _QUESTION, _REPLY = draw_ids(5, 2), draw_ids(11, 3), draw_ids(9, 4), draw_ids(6, 5)
_SEGMENTS = (draw_ids(40, 6), draw_ids(23, 7), draw_ids(75, 8))
_ORDER = (2, 0, 1)
_OTHER_ORDERS = ((0, 1, 2), (1, 2, 0), (0, 0, 2))
_WINDOW = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """Relative errors of one variant.

    oracle, reference: full recompute against the public implementation in fp32 and in fp64, the worst position;
    composition: three segments in `_ORDER`, with decoding; any_order: the worst of `_OTHER_ORDERS`; mistakes: what a
    composition would be off by.
    """

    oracle: float
    reference: float
    composition: float
    any_order: float
    mistakes: dict[Mistake, float]


class Composition:
    """One variant's segments, captured by the engine and by the fp64 reference."""

    def __init__(self, rig: PassRig, reference: ReferenceModel) -> None:
        self._rig, self._reference = rig, reference
        self._states = rig.capture(*_SEGMENTS)
        self._records = [reference.capture(_PRIME, segment, _WINDOW) for segment in _SEGMENTS]

    def composed(self, order: Sequence[int]) -> torch.Tensor:
        """The engine's logits `[n, vocabulary]` of a forced reply behind the segments in an order."""
        stored = [CombinePart(_SEGMENTS[index], self._states[index]) for index in order]
        combined = self._rig.combine(CombinePart(_SYSTEM), *stored, CombinePart(_QUESTION))
        return self._rig.decode(combined, _REPLY)

    def error(self, order: Sequence[int]) -> float:
        """Of the engine's composition."""
        return _worst_position(self.composed(order), self._expected(order, self._records))

    def errors_of_mistakes(self, order: Sequence[int]) -> dict[Mistake, float]:
        """How far the engine's composition is from one that makes a mistake, for each that the family can make."""
        composed = self.composed(order)
        return {
            mistake: _worst_position(
                composed, self._expected(order, [edit_record(record, mistake) for record in self._records])
            )
            for mistake in possible_mistakes(self._reference)
        }

    def _expected(self, order: Sequence[int], records: Sequence[Record]) -> torch.Tensor:
        stored = [Part(_SEGMENTS[index], records[index]) for index in order]
        logits = self._reference.logits([Part(_SYSTEM), *stored, Part(_QUESTION + _REPLY[:-1])])
        return logits[-len(_REPLY) :]


def _worst_position(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of any row."""
    return _largest(relative_error(*rows) for rows in zip(actual, expected, strict=True))


def _largest(errors: Iterable[float]) -> float:
    """NaN where any is, which `max` may pass over."""
    return float(torch.tensor(list(errors), dtype=torch.float64).max())


def _remembering_rig(directory: Path) -> PassRig:
    """Its gates remember, without which no figure would mean anything."""
    profile = CaptureProfile(SeamWindow(_WINDOW), _PRIME)
    rig = PassRig(create_context(directory, torch.device("cpu"), profile))
    for state in rig.capture(*_SEGMENTS):
        rig.assert_remembers(state)
        rig.context.pages.release(state.pages)
    return rig


def measure(rig: PassRig, model: ReferenceModel, public: torch.Tensor) -> Figures:
    """A variant's figures; public: the public implementation's logits `[N, vocabulary]` of the prompt."""
    ends = range(1, len(_PROMPT) + 1)
    recomputed = torch.stack([rig.logits(CombinePart(_PROMPT[:end])) for end in ends])
    composition = Composition(rig, model)
    return Figures(
        oracle=_worst_position(recomputed, public),
        reference=_worst_position(recomputed, model.logits([Part(_PROMPT)])),
        composition=composition.error(_ORDER),
        any_order=_largest(composition.error(order) for order in _OTHER_ORDERS),
        mistakes=composition.errors_of_mistakes(_ORDER),
    )


def rows_of(family: str, variants: Sequence[Figures]) -> Iterator[Row]:
    """The worst of a family's variants: the largest error, and what would be seen least of every mistake."""
    errors = {
        "oracle error": _largest(each.oracle for each in variants),
        "error against fp64": _largest(each.reference for each in variants),
        "composition error": _largest(each.composition for each in variants),
        "error in any order": _largest(each.any_order for each in variants),
    }
    for name, error in errors.items():
        yield Row(f"{family} / {name}", error, "relative", TOLERANCE, "lower")
    mistakes = {
        mistake: min(each.mistakes[mistake] for each in variants if mistake in each.mistakes)
        for mistake in Mistake
        if any(mistake in each.mistakes for each in variants)
    }
    least = min(mistakes, key=lambda mistake: mistakes[mistake])
    yield Row(f"{family} / smallest negative control ({least})", mistakes[least], "relative", 10 * TOLERANCE)
    for mistake, error in mistakes.items():
        yield Row(f"{family} / {mistake}", error, "relative", 10 * TOLERANCE)


def measure_families(variants: Sequence[Variant]) -> dict[str, list[Figures]]:
    """Every variant's figures by the family that loads it."""
    found: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory() as root:
        checkpoints = CheckpointFactory(Path(root))
        for variant in variants:
            rig = _remembering_rig(checkpoints.directory(variant))
            public = reference_logits(checkpoints.model(variant), _PROMPT)
            figures = measure(rig, ReferenceModel(checkpoints.taken_apart(variant)), public)
            found.setdefault(rig.context.model.spec.family, []).append(figures)
            print(f"{figures.oracle:8.1e} {figures.composition:8.1e}  {variant.name}", flush=True)
    return found


def _is_reached(row: Row) -> bool:
    if row.reach is None:
        return True
    return row.value >= row.reach if row.better == "higher" else row.value <= row.reach


def main(out: Annotated[Path, typer.Option(help="Where to write the result file.")]) -> None:
    """Measure every variant of tests/models.py and write the worst of each family."""
    torch.set_num_threads(1)
    rows = [row for family, variants in measure_families(VARIANTS).items() for row in rows_of(family, variants)]
    device = f"CPU, {os.cpu_count()} cores, {platform.machine()}, fp32"
    write_results(out, f"python -m bench.families --out {out}", device, rows)
    missed = [row.measure for row in rows if not _is_reached(row)]
    if missed:
        sys.exit(f"out of reach: {', '.join(missed)}")


if __name__ == "__main__":
    typer.run(main)
