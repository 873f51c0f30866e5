"""What the comparison of encodings says: sizes at true shapes, and divergences question by question."""

from pathlib import Path

import pytest
import torch

from eval.encodings import COMPACT, ENCODINGS, compare_encodings, encoding_settings, stored_linear_bytes
from eval.scoring import Outcome, Scores
from services.blob.encodings import EXACT, StateEncoding
from services.worker.models.registry import read_checkpoint_spec

SPEC = read_checkpoint_spec(Path("tests/data/configs/Qwen3.5-35B-A3B"))
MIB = 1 << 20


def _mib(encoding: StateEncoding, *decays: float) -> float:
    return stored_linear_bytes(encoding, SPEC, torch.tensor(decays)) / MIB


def test_sizes_at_a_true_shape() -> None:
    """Exact is what the design says, two times 60 MiB beside tails; compact lies below 31 MiB however many heads remember."""
    assert _mib(EXACT, 0.3) == pytest.approx(sum(state.plane_bytes(2) for state in SPEC.states) / MIB)
    assert _mib(COMPACT, 0.0) == pytest.approx(15.8, abs=0.1)
    for decay in (0.3, 0.9, 1.0):
        assert 30.9 < _mib(COMPACT, decay) <= 31.0
    assert _mib(ENCODINGS[1], 0.3) == pytest.approx(61.4, abs=0.1)


def _outcome(question: int, setting: str, divergence: float) -> Outcome:
    return Outcome(question, setting, Scores("", True, 1.0, True, divergence, divergence), 0, 1)


def test_divergences_are_compared_on_the_same_questions() -> None:
    exact, *others = encoding_settings()
    outcomes = [_outcome(question, exact.name, 0.1 * (question + 1)) for question in range(4)]
    for own in others:
        outcomes += [_outcome(question, own.name, 0.11 * (question + 1)) for question in (0, 2)]
    first, *rest = compare_encodings(outcomes)
    assert first.more.value == 0.0
    assert all(own.questions == 2 and own.more.value == pytest.approx(10.0) for own in rest)
    assert [own.encoding for own in rest][-1].negligible_decay == 1.0


def test_names_tell_encodings_apart() -> None:
    names = [own.name for own in encoding_settings()]
    assert len(set(names)) == len(names)
