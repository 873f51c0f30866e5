"""Checkpoints: what transformers writes is served, and what cannot be served is refused in one line that helps."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from services.worker.engine.combine import CombinePart
from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from services.worker.models.errors import CheckpointError
from tests.exactness.rig import PassRig, assert_close, create_context, draw_ids
from tests.models import VARIANTS, CheckpointFactory, Variant, reference_logits
from tests.unit.worker.checkpoint_files import edit_config, edit_tensors, shard_weights

IDS = draw_ids(70, 1)
NAME = "model.layers.0.linear_attn.conv1d.weight"


@pytest.fixture
def directory(checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    return Path(shutil.copytree(checkpoints.directory(VARIANTS[0]), tmp_path / "checkpoint"))


def _logits(directory: Path, device: torch.device) -> torch.Tensor:
    rig = PassRig(create_context(directory, device, CaptureProfile(SeamWindow(4), ())))
    return rig.logits(CombinePart(IDS))


def _refusal(directory: Path, device: torch.device) -> str:
    with pytest.raises(CheckpointError) as caught:
        _logits(directory, device)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_shape_loads(checkpoints: CheckpointFactory, variant: Variant, device: torch.device) -> None:
    expected = reference_logits(checkpoints.model(variant), IDS)[-1]
    assert_close(_logits(checkpoints.directory(variant), device), expected)


def test_shards(directory: Path, checkpoints: CheckpointFactory, device: torch.device) -> None:
    shard_weights(directory)
    assert_close(_logits(directory, device), reference_logits(checkpoints.model(VARIANTS[0]), IDS)[-1])


def test_half_precision_weights_are_read_in_the_engines_dtype(
    directory: Path, checkpoints: CheckpointFactory, device: torch.device
) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({name: each.bfloat16() for name, each in tensors.items()}))
    rounded = _logits(directory, device)
    assert rounded.dtype == torch.float32
    assert_close(rounded, reference_logits(checkpoints.model(VARIANTS[0]), IDS)[-1], 0.2)


def test_no_checkpoint(tmp_path: Path, device: torch.device) -> None:
    message = _refusal(tmp_path, device)
    assert str(tmp_path / "config.json") in message
    assert "Hugging Face checkpoint" in message


@pytest.mark.parametrize("content", ["{", "[]", '"text"', "\udcff"])
def test_damaged_config(content: str, directory: Path, device: torch.device) -> None:
    (directory / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert "config.json" in _refusal(directory, device)


def test_unknown_model_type(directory: Path, device: torch.device) -> None:
    edit_config(directory, model_type="mamba9")
    message = _refusal(directory, device)
    assert "config.json" in message
    assert "'mamba9'" in message
    assert "qwen3_5" in message


def test_missing_weights(directory: Path, device: torch.device) -> None:
    (directory / "model.safetensors").unlink()
    message = _refusal(directory, device)
    assert "model.safetensors" in message
    assert "download" in message


def test_missingshard_weights(directory: Path, device: torch.device) -> None:
    shard_weights(directory)
    (directory / "model-00002-of-00003.safetensors").unlink()
    message = _refusal(directory, device)
    assert "model-00002-of-00003.safetensors" in message
    assert "download" in message


@pytest.mark.parametrize("index", ["{}", "[]", "{", '{"weight_map": 3}'])
def test_damaged_index(index: str, directory: Path, device: torch.device) -> None:
    (directory / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in _refusal(directory, device)


@pytest.mark.parametrize("kept_bytes", [0, 4, 200, 5000])
def test_truncated_file(kept_bytes: int, directory: Path, device: torch.device) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    message = _refusal(directory, device)
    assert str(path) in message
    assert "download" in message


def test_truncatedshard_weights(directory: Path, device: torch.device) -> None:
    shard_weights(directory)
    path = directory / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:300])
    message = _refusal(directory, device)
    assert str(path) in message
    assert "download" in message


def test_missing_tensor(directory: Path, device: torch.device) -> None:
    edit_tensors(directory, lambda tensors: tensors.__delitem__(NAME))
    message = _refusal(directory, device)
    assert NAME in message
    assert "incomplete" in message


def test_a_shard_without_its_tensor(directory: Path, device: torch.device) -> None:
    shard_weights(directory)
    path = directory / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    others = sorted(set(weight_map.values()) - {weight_map[NAME]})
    path.write_text(json.dumps({"weight_map": {**weight_map, NAME: others[0]}}))
    message = _refusal(directory, device)
    assert NAME in message
    assert others[0] in message


def test_wrong_shape(directory: Path, device: torch.device) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({NAME: torch.zeros(3, 1, 4)}))
    message = _refusal(directory, device)
    assert NAME in message
    assert "(3, 1, 4)" in message
    assert "download" in message
