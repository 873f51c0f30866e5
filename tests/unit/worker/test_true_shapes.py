"""The configs of released models, without their weights: what is said of them agrees with what is known of them.

Parameters, keys and values of a token (bf16) and the recurrent states of a sequence (fp32) are sums over the published
shapes, made apart from this code; `published` are the counts that the models' cards and papers name.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.worker.inspection.report import CheckpointReport, inspect_checkpoint

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
GIGA, KIB, MIB = 10**9, 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Known:
    """parameters in 10^9; token in KiB; states in MiB; published: total and active parameters in 10^9, None where unnamed.

    vocabulary: how many of embedding and head the published active count includes, as far as it tells.
    """

    parameters: float
    token: float
    states: float
    published: float
    published_active: float | None = None
    vocabulary: int = 1


KNOWN = {
    "Qwen3.5-0.8B": Known(0.752, 12, 18, published=0.8),
    "Qwen3.5-2B": Known(1.88, 12, 18, published=2),
    "Qwen3.5-4B": Known(4.21, 32, 48, published=4),
    "Qwen3.5-9B": Known(8.95, 32, 48, published=9),
    "Qwen3.5-27B": Known(26.9, 64, 144, published=27),
    "Qwen3.5-35B-A3B": Known(34.66, 20, 60, published=35, published_active=3),
    "Qwen3.5-122B-A10B": Known(122.1, 24, 144, published=122, published_active=10, vocabulary=2),
    "Qwen3-Next-80B-A3B": Known(79.67, 24, 72, published=80, published_active=3, vocabulary=0),
    "Kimi-Linear-48B-A3B": Known(49.12, 7.875, 40, published=48, published_active=3),
    "MiniMax-M1-80k": Known(456.1, 40, 280, published=456, published_active=45.9),
    "Ring-mini-linear-2.0": Known(16.4, 8, 16, published=16.4, published_active=1.6, vocabulary=2),
    "Ring-flash-linear-2.0": Known(104.2, 8, 56, published=104.2, published_active=7.4, vocabulary=2),
    "Ring-2.5-1T": Known(1012.2, 11.25, 280, published=1000, published_active=63),
}


@pytest.fixture(scope="module", params=KNOWN)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def report(name: str) -> CheckpointReport:
    return inspect_checkpoint(CONFIGS / name)


def test_parameters(name: str, report: CheckpointReport) -> None:
    """To the digits that are known; to a tenth of the published count, which names a model rather than measures it."""
    assert report.sizes.parameters == pytest.approx(KNOWN[name].parameters * GIGA, rel=0.003)
    assert report.sizes.parameters == pytest.approx(KNOWN[name].published * GIGA, rel=0.1)


def test_active_parameters(name: str, report: CheckpointReport) -> None:
    """Most cards round to a whole number. What is said here counts the head, and the embedding where it is the head."""
    known, matrix = KNOWN[name], report.vocab_size * report.hidden_size
    if known.published_active is None:
        assert report.sizes.active_parameters == report.sizes.parameters - (0 if report.tied_head else matrix)
    else:
        counted = report.sizes.active_parameters + (known.vocabulary - 1) * matrix
        assert counted == pytest.approx(known.published_active * GIGA, rel=0.09)


def test_ring_activates_what_its_paper_says() -> None:
    """957 M of Ring-mini and 6.1 B of Ring-flash without embedding and head (arXiv 2510.19338)."""
    for name, published in (("Ring-mini-linear-2.0", 0.957), ("Ring-flash-linear-2.0", 6.1)):
        report = inspect_checkpoint(CONFIGS / name)
        inside = report.sizes.active_parameters - report.vocab_size * report.hidden_size
        assert inside == pytest.approx(published * GIGA, rel=0.01)


def test_what_a_token_and_a_sequence_keep(name: str, report: CheckpointReport) -> None:
    assert report.sizes.token == pytest.approx(KNOWN[name].token * KIB, rel=0.005)
    assert report.sizes.segment.end_states == KNOWN[name].states * MIB


def test_every_field_of_a_released_config_is_known(report: CheckpointReport) -> None:
    assert report.unknown_fields == ()


def test_what_a_family_warns_of_is_said(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "Ring-mini-linear-2.0" / "config.json").read_text())
    del config["hypic_slope_layer_offset"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (remark,) = inspect_checkpoint(tmp_path).remarks
    assert "hypic_slope_layer_offset" in remark


def test_every_config_is_known() -> None:
    assert {path.parent.name for path in CONFIGS.glob("*/config.json")} == set(KNOWN)
