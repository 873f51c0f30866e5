"""What is read of a checkpoint beside its weights."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.adapters.description import WorkerPlace, describe
from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.served_model import ServedModel, read_served_model
from services.worker.models.errors import CheckpointError
from services.worker.profile import ProfileError
from services.worker.settings import WorkerSettings
from tests.e2e.stack.checkpoint import CONTEXT_LENGTH, write_random_checkpoint
from tests.unit.worker.checkpoint_files import edit_config

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


def _refusal(checkpoint: Path) -> str:
    with pytest.raises((CheckpointError, ProfileError)) as caught:
        _read(checkpoint)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("content", [b"{", b"{}", b"\xff\xfe", b"[1]"])
def test_a_damaged_tokenizer(content: bytes, checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_bytes(content)
    message = _refusal(checkpoint)
    assert message.startswith(f"{checkpoint / 'tokenizer.json'}: not readable as a tokenizer")
    assert "download the file again" in message


def test_a_tokenizer_of_another_model(checkpoint: Path) -> None:
    """An id without a row in the embedding would fail inside a pass."""
    spec = _read(checkpoint).spec
    edit_config(checkpoint, vocab_size=spec.vocab_size - 1)
    message = _refusal(checkpoint)
    assert message.startswith(
        f"{checkpoint / 'tokenizer.json'}: token id {spec.vocab_size - 1} is outside the vocab_size"
    )
    assert "of one revision" in message


def test_an_embedding_with_spare_rows(checkpoint: Path) -> None:
    edit_config(checkpoint, vocab_size=_read(checkpoint).spec.vocab_size + 64)
    _read(checkpoint)


@pytest.mark.parametrize("end", ["2", {"id": 2}, [2, None], [[2]], -1, True, 1 << 40])
def test_end_tokens_that_are_no_ids(end: object, checkpoint: Path) -> None:
    path = checkpoint / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": end}))
    assert _refusal(checkpoint).startswith(f"{path}: eos_token_id must be a token id or a list of them, not {end!r}")


def test_a_template_that_is_no_text(checkpoint: Path) -> None:
    path = checkpoint / "chat_template.jinja"
    path.write_bytes(b"\xff\xfe")
    assert _refusal(checkpoint).startswith(f"{path}: no UTF-8 text")


def test_a_profile_that_is_no_text(checkpoint: Path) -> None:
    path = checkpoint / "profile.toml"
    path.write_bytes(b"\xff\xfe")
    assert _refusal(checkpoint).startswith(f"{path}: ")


def test_a_weights_file_that_leads_nowhere(checkpoint: Path) -> None:
    path = checkpoint / "other.safetensors"
    path.symlink_to("gone")
    message = _refusal(checkpoint)
    assert message.startswith(f"{path}: not readable")
    assert "delete it" in message


def test_a_prime_longer_than_the_context(checkpoint: Path) -> None:
    path = checkpoint / "profile.toml"
    path.write_text(f'prime = "{"a house " * CONTEXT_LENGTH}"\n')
    message = _refusal(checkpoint)
    assert message.startswith(f"{path}: prime has ")
    assert "shorten it" in message


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
    told = next(describe(_read(checkpoint), WorkerPlace("worker", min_body=16))).info.profile
    assert (told.min_segment_tokens, told.min_body) == (least, 16)


def test_weights_of_a_seed_are_a_model_of_their_own(checkpoint: Path) -> None:
    drawn = [read_served_model(WorkerSettings(checkpoint=checkpoint, weights=f"random:{seed}")) for seed in (1, 1, 2)]
    revisions = [own.revision for own in drawn]
    assert revisions[0] == revisions[1]
    assert len({*revisions, _read(checkpoint).revision}) == 3
    with pytest.raises(ValueError, match="weights"):
        WorkerSettings(checkpoint=checkpoint, weights="random")


def test_a_shape_without_weights_is_served_with_drawn_ones(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    settings = WorkerSettings(checkpoint=checkpoint, weights="random:3", page_bytes=1 << 22, state_bytes=1 << 22)
    logits = [_first_logits(settings) for _ in range(2)]
    assert torch.equal(*logits)
    assert not torch.equal(logits[0], _first_logits(settings.model_copy(update={"weights": "random:4"})))
    with pytest.raises(CheckpointError, match="safetensors"):
        _first_logits(settings.model_copy(update={"weights": "checkpoint"}))


def _first_logits(settings: WorkerSettings) -> torch.Tensor:
    model = build_engine(settings, read_served_model(settings)).context.model
    with torch.inference_mode():
        return model.logits(model.embed(torch.tensor([5])))
