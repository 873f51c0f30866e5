"""What is read of a checkpoint beside its weights."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker.adapters.messages import describe
from services.worker.adapters.served_model import ServedModel, read_served_model
from services.worker.settings import WorkerSettings
from tests.e2e.stack.checkpoint import write_random_checkpoint

DEMO = Path(__file__).parents[3] / "models" / "demo"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_random_checkpoint(tmp_path, DEMO)
    return tmp_path


def _read(checkpoint: Path) -> ServedModel:
    return read_served_model(WorkerSettings(checkpoint=checkpoint))


def test_the_same_files_have_the_same_digest(checkpoint: Path) -> None:
    assert _read(checkpoint) == _read(checkpoint)


def _swap_weights(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _change_config(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    path.write_text(path.read_text() + " ")


def _change_profile(checkpoint: Path) -> None:
    (checkpoint / "profile.toml").write_text("seam_window = 17\n")


@pytest.mark.parametrize("change", [_swap_weights, _change_config, _change_profile])
def test_another_byte_is_another_digest(change: Callable[[Path], None], checkpoint: Path) -> None:
    """Swapped weights, another shape, another profile: no state of the old one can be found under the new one."""
    before = _read(checkpoint)
    change(checkpoint)
    after = _read(checkpoint)
    assert after.profile_digest != before.profile_digest
    assert (after.revision == before.revision) == (change is _change_profile)


def test_another_dtype_is_another_digest(checkpoint: Path) -> None:
    wide = _read(checkpoint)
    narrow = read_served_model(WorkerSettings(checkpoint=checkpoint, dtype="bfloat16"))
    assert narrow.profile_digest != wide.profile_digest


@pytest.mark.parametrize(
    ("profile", "least"),
    [
        ("seam_window = 8", 24),
        ("seam_window = 32\nseam_share = 0.15\nseam_window_max = 128", 48),
        ("seam_window = 4\nseam_share = 0.5", 32),
        ("seam_window = 0\nseam_share = 1.0\nseam_window_max = 50", 66),
    ],
)
def test_the_router_is_told_the_least_segment(profile: str, least: int, checkpoint: Path) -> None:
    """Its body has the 16 tokens that are worth composing; the rule itself stays with the worker."""
    (checkpoint / "profile.toml").write_text(profile)
    told = next(describe(_read(checkpoint), "worker", min_body=16)).info.profile
    assert (told.min_segment_tokens, told.min_body) == (least, 16)
