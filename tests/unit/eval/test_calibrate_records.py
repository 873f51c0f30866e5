"""What a calibration has measured outlives it, and mixes with no other one's."""

from dataclasses import asdict
from pathlib import Path

import pytest

from eval.calibrate.records import Identity, OutcomeFile
from eval.checks import EvaluationError
from eval.scoring import Outcome, Scores

IDENTITY = Identity("r", "p", "q", "Be brief.", 8, "CPU")


def _outcomes(number: int) -> list[Outcome]:
    return [Outcome(number, name, Scores("ä", False, 0.5, True, 0.25, 1e-9), 3, 9) for name in ("off", "a", "b")]


def test_a_later_run_finds_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    first = OutcomeFile(path, IDENTITY)
    first.add(_outcomes(4))
    for file in (first, OutcomeFile(path, IDENTITY)):
        assert file.of(4, ["off", "a"]) == _outcomes(4)[:2]
        assert file.of(4, ["off", "c"]) == []
        assert file.of(5, ["off"]) == []


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    file = OutcomeFile(path, IDENTITY)
    file.add(_outcomes(1))
    file.add(_outcomes(2))
    path.write_bytes(path.read_bytes()[:-20])
    again = OutcomeFile(path, IDENTITY)
    assert again.of(1, ["off", "a", "b"]) == _outcomes(1)
    assert again.of(2, ["off"]) == []
    again.add(_outcomes(2))
    assert OutcomeFile(path, IDENTITY).of(2, ["off", "a", "b"]) == _outcomes(2)


@pytest.mark.parametrize("name", ["revision", "profile_digest", "prompts", "system", "tokens", "device"])
def test_another_calibration_is_not_mixed_in(name: str, tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    OutcomeFile(path, IDENTITY).add(_outcomes(1))
    with pytest.raises(EvaluationError, match=f"another calibration, of other {name}; delete it"):
        OutcomeFile(path, Identity(**(asdict(IDENTITY) | {name: 9 if name == "tokens" else "other"})))


@pytest.mark.parametrize("content", ["text\n", "[]\n", "{}\n", ""])
def test_a_file_that_is_none(content: str, tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    path.write_text(content)
    with pytest.raises(EvaluationError, match="not readable as outcomes"):
        OutcomeFile(path, IDENTITY)
