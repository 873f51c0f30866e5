"""A calibration card is read as it was written, and speaks of nothing but what it was measured on."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.worker.adapters.description import WorkerPlace, describe
from services.worker.adapters.served_model import Calibration, ServedModel, read_served_model
from services.worker.calibration import CalibrationError, load_card, mismatch, write_card
from services.worker.profile import Profile
from services.worker.settings import WorkerSettings
from tests.calibration import REVISION, make_card
from tests.e2e.stack.checkpoint import write_random_checkpoint

DEMO = Path("models/demo")
CHANGED: dict[str, Any] = {
    "seam_window": 9,
    "seam_share": 0.5,
    "seam_window_max": 64,
    "prime": "x",
    "document_open": "<",
    "document_close": ">",
    "end_state": "int8",
    "transition": "int8",
    "slow_transition": "int8",
    "slow_decay": 0.75,
    "negligible_decay": 0.25,
    "conv_tail": "int8",
}


def test_a_card_is_read_as_it_was_written(tmp_path: Path) -> None:
    card = make_card()
    write_card(card, tmp_path / "calibration.json")
    assert load_card(tmp_path / "calibration.json") == card
    assert mismatch(card, REVISION, "float32", Profile()) == ""


def _refusal(path: Path) -> str:
    with pytest.raises(CalibrationError) as caught:
        load_card(path)
    message = str(caught.value)
    assert "\n" not in message
    assert "hypic calibrate" in message
    return message


def _set(*path: str, to: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_set("chosen", "kl", "value", to=0.001), "digest: the content has been changed"),
        (_set("prompts", "asked", to=4000), "digest: the content has been changed"),
        (_set("version", to=2), "version: "),
        (_set("tokens", to="8"), "tokens: "),
        (_set("chosen", "live_share", to=1.5), "chosen.live_share: "),
        (_set("chosen", "kl", "high", to=None), "chosen.kl.high: "),
        (_set("surprise", to=1), "surprise: "),
        (_set("settings", to=[{}]), "settings.0.name: "),
        (_set("digest", to=""), "digest: "),
    ],
)
def test_what_was_not_measured_is_refused(change: Callable[[dict[str, Any]], None], told: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_card(make_card(), path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert _refusal(path).startswith(told)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"\xff\xfe"])
def test_a_file_that_is_no_card(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    if content is not None:
        path.write_bytes(content)
    _refusal(path)


def test_another_model_dtype_or_profile_is_named() -> None:
    card = make_card()
    assert "model.revision: the card is of the weights abab" in mismatch(card, "ef" * 32, "float32", Profile())
    assert "model.dtype: measured in float32, and bfloat16 is served" in mismatch(card, REVISION, "bfloat16", Profile())
    for name, value in CHANGED.items():
        told = mismatch(card, REVISION, "float32", replace(Profile(), **{name: value}))
        assert told.startswith(f"profile.{name}: measured with "), name


def test_every_field_of_a_profile_is_compared() -> None:
    assert set(CHANGED) == set(Profile.__dataclass_fields__)


def test_another_layout_of_states_is_another_digest() -> None:
    assert "profile_digest: " in mismatch(make_card(profile_digest="0" * 64), REVISION, "float32", Profile())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(directory, DEMO)
    return directory


def _served(checkpoint: Path, card: Path | None = None) -> ServedModel:
    return read_served_model(WorkerSettings(checkpoint=checkpoint, calibration=card))


def test_a_worker_reads_the_card_beside_the_weights_or_the_one_it_is_given(checkpoint: Path, tmp_path: Path) -> None:
    assert _served(checkpoint).calibration == Calibration(refusal="no calibration card")
    before = _served(checkpoint)
    card = make_card(before.revision, before.profile)
    write_card(card, tmp_path / "card.json")
    assert _served(checkpoint, tmp_path / "card.json").calibration == Calibration(card, "")
    write_card(card, checkpoint / "calibration.json")
    try:
        served = _served(checkpoint)
        assert served.calibration == Calibration(card, "")
        assert served.profile_digest == before.profile_digest
        told = next(describe(served, WorkerPlace("worker"))).info.calibration
        assert (told.card_digest, told.prompts, told.num_prompts) == (card.digest, "prompts.jsonl", 40)
        assert (told.divergence.value, told.divergence.low, told.divergence.high) == (0.02, 0.01, 0.04)
    finally:
        (checkpoint / "calibration.json").unlink()


def test_a_card_of_something_else_leaves_the_model_uncalibrated_and_served(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    write_card(make_card(profile=_served(checkpoint).profile), path)
    served = _served(checkpoint, path)
    assert served.calibration.card is None
    assert served.calibration.refusal.startswith("card.json: model.revision: ")
    told = next(describe(served, WorkerPlace("worker"))).info.calibration
    assert (told.refusal, told.card_digest) == (served.calibration.refusal, "")


def test_a_card_that_is_named_and_missing_is_told(checkpoint: Path, tmp_path: Path) -> None:
    assert _served(checkpoint, tmp_path / "gone.json").calibration.refusal.startswith("gone.json: not readable")
