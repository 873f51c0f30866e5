"""Every family that is served has its exactness measured, and within reach."""

from pathlib import Path

from bench.results import read_results
from services.worker.inspection.families import FAMILY_NOTES

FIGURES = Path("bench/results/families.json")


def test_every_family_is_measured() -> None:
    measured = {row.measure.partition(" / ")[0] for row in read_results(FIGURES).rows}
    assert measured == {notes.name for notes in FAMILY_NOTES}, "run `make bench`, or python -m bench.families"


def test_every_figure_is_within_reach() -> None:
    for row in read_results(FIGURES).rows:
        assert row.reach is not None
        assert row.value >= row.reach if row.better == "higher" else row.value <= row.reach, row.measure
