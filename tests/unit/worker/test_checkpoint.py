"""Checkpoints: what transformers writes is served, and what cannot be served is refused in one line that helps."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.engine.combine import CombinePart
from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from services.worker.models.errors import CheckpointError
from services.worker.models.registry import read_checkpoint_spec
from tests.exactness.rig import PassRig, assert_close, create_context, draw_ids
from tests.models import VARIANTS, CheckpointFactory, Variant, reference_logits

IDS = draw_ids(70, 1)
NAME = "model.layers.0.linear_attn.conv1d.weight"


@pytest.fixture
def directory(checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    return Path(shutil.copytree(checkpoints.directory(VARIANTS[0]), tmp_path / "checkpoint"))


def _logits(directory: Path, device: torch.device) -> torch.Tensor:
    rig = PassRig(create_context(directory, device, CaptureProfile(SeamWindow(4), ())))
    return rig.logits(CombinePart(IDS))


def _edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def _edit_config(directory: Path, **changes: Any) -> None:  # noqa: ANN401 # any JSON
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def _shard(directory: Path) -> None:
    """The same weights in three shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(3):
        file = f"model-0000{shard + 1}-of-00003.safetensors"
        chosen = {name: tensor for index, (name, tensor) in enumerate(sorted(tensors.items())) if index % 3 == shard}
        save_file(chosen, directory / file)
        weight_map.update(dict.fromkeys(chosen, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


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
    _shard(directory)
    assert_close(_logits(directory, device), reference_logits(checkpoints.model(VARIANTS[0]), IDS)[-1])


def test_multimodal_names_and_prediction_heads(
    directory: Path, checkpoints: CheckpointFactory, device: torch.device
) -> None:
    """Text weights under their multimodal prefix; a vision tower and `mtp.*` beside them; the config nested."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("model."):
                tensors[f"model.language_model.{name.removeprefix('model.')}"] = tensors.pop(name)
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(4, 4)
        tensors["mtp.layers.0.mlp.gate_proj.weight"] = torch.zeros(4, 4)

    _edit_tensors(directory, rename)
    path = directory / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_5", "text_config": json.loads(path.read_text())}))
    assert_close(_logits(directory, device), reference_logits(checkpoints.model(VARIANTS[0]), IDS)[-1])


def test_half_precision_weights_are_read_in_the_engines_dtype(
    directory: Path, checkpoints: CheckpointFactory, device: torch.device
) -> None:
    _edit_tensors(directory, lambda tensors: tensors.update({name: each.bfloat16() for name, each in tensors.items()}))
    rounded = _logits(directory, device)
    assert rounded.dtype == torch.float32
    assert_close(rounded, reference_logits(checkpoints.model(VARIANTS[0]), IDS)[-1], 0.2)


def test_layer_types_follow_from_the_interval(directory: Path) -> None:
    kinds = read_checkpoint_spec(directory).layers
    _edit_config(directory, layer_types=None, full_attention_interval=3)
    assert read_checkpoint_spec(directory).layers == kinds


def test_no_checkpoint(tmp_path: Path, device: torch.device) -> None:
    message = _refusal(tmp_path, device)
    assert str(tmp_path / "config.json") in message
    assert "Hugging Face checkpoint" in message


@pytest.mark.parametrize("content", ["{", "[]", '"text"', "\udcff"])
def test_damaged_config(content: str, directory: Path, device: torch.device) -> None:
    (directory / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert "config.json" in _refusal(directory, device)


def test_unknown_model_type(directory: Path, device: torch.device) -> None:
    _edit_config(directory, model_type="mamba9")
    message = _refusal(directory, device)
    assert "config.json" in message
    assert "'mamba9'" in message
    assert "qwen3_5" in message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"head_dim": None}, "head_dim"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim"),
        ({"vocab_size": True}, "vocab_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"layer_types": None, "full_attention_interval": None}, "full_attention_interval"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_fields(changes: dict[str, Any], field: str, directory: Path, device: torch.device) -> None:
    _edit_config(directory, **changes)
    message = _refusal(directory, device)
    assert "config.json" in message
    assert field in message


def test_missing_weights(directory: Path, device: torch.device) -> None:
    (directory / "model.safetensors").unlink()
    message = _refusal(directory, device)
    assert "model.safetensors" in message
    assert "download" in message


def test_missing_shard(directory: Path, device: torch.device) -> None:
    _shard(directory)
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


def test_truncated_shard(directory: Path, device: torch.device) -> None:
    _shard(directory)
    path = directory / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:300])
    message = _refusal(directory, device)
    assert str(path) in message
    assert "download" in message


def test_missing_tensor(directory: Path, device: torch.device) -> None:
    _edit_tensors(directory, lambda tensors: tensors.__delitem__(NAME))
    message = _refusal(directory, device)
    assert NAME in message
    assert "incomplete" in message


def test_a_shard_without_its_tensor(directory: Path, device: torch.device) -> None:
    _shard(directory)
    path = directory / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    others = sorted(set(weight_map.values()) - {weight_map[NAME]})
    path.write_text(json.dumps({"weight_map": {**weight_map, NAME: others[0]}}))
    message = _refusal(directory, device)
    assert NAME in message
    assert others[0] in message


def test_wrong_shape(directory: Path, device: torch.device) -> None:
    _edit_tensors(directory, lambda tensors: tensors.update({NAME: torch.zeros(3, 1, 4)}))
    message = _refusal(directory, device)
    assert NAME in message
    assert "(3, 1, 4)" in message
    assert "download" in message


def test_quantised_tensor(directory: Path, device: torch.device) -> None:
    _edit_tensors(directory, lambda tensors: tensors.update({NAME: tensors[NAME].to(torch.int8)}))
    message = _refusal(directory, device)
    assert NAME in message
    assert "quantised" in message
