"""Damaged checkpoints of every family stop the load with one line that names the file, the tensor or field, and the remedy."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.inspection.requests import record_requests
from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import read_json
from services.worker.models.errors import CheckpointError
from services.worker.models.registry import FAMILIES, find_family, load_checkpoint
from tests.models import VARIANTS, CheckpointFactory, Variant
from tests.unit.worker.checkpoint_files import edit_config, edit_tensors, shard_weights

WEIGHTS, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00002-of-00003.safetensors"
# Fields that say which layers are linear; every family reads at least one of them.
PATTERNS: Mapping[str, Any] = {"layer_types": ["sliding_attention"] * 3, "layer_group_size": "three"}


def _one_a_family() -> list[Variant]:
    """The first variant of every name ahead of the dash."""
    found: dict[str, Variant] = {}
    for variant in VARIANTS:
        found.setdefault(variant.name.split("-")[0], variant)
    return list(found.values())


@pytest.fixture(params=_one_a_family(), ids=lambda variant: variant.name)
def directory(request: pytest.FixtureRequest, checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    """A checkpoint of one's own, of every family."""
    return Path(shutil.copytree(checkpoints.directory(request.param), tmp_path / "checkpoint"))


def _refusal(directory: Path) -> str:
    memory = DeviceMemory(torch.device("cpu"), torch.float32, num_pages=1, page_size=16, num_slots=1)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(directory, memory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def _tensors_of_every_kind(directory: Path) -> list[str]:
    """Names that the model reads; of names that differ in a layer's or an expert's number the first."""
    config = read_json(directory / "config.json")
    family = find_family(directory, config)
    stored = frozenset(load_file(directory / WEIGHTS))
    kinds: dict[str, str] = {}
    for name in record_requests(family, family.read_spec(config), torch.float32, stored):
        kinds.setdefault(re.sub(r"\.\d+\.", ".n.", name), name)
    return list(kinds.values())


def test_every_registered_family_is_damaged(checkpoints: CheckpointFactory) -> None:
    types = {read_json(checkpoints.directory(variant) / "config.json")["model_type"] for variant in _one_a_family()}
    assert all(types & family.model_types for family in FAMILIES)


def test_a_missing_tensor(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    for name in _tensors_of_every_kind(directory):
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, directory / WEIGHTS)
        message = _refusal(directory)
        assert f"{WEIGHTS}: tensor {name} is missing" in message
        assert "download" in message


def test_a_tensor_of_another_shape(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    for name in _tensors_of_every_kind(directory):
        longer = torch.cat([tensors[name], tensors[name][:1]])
        save_file({**tensors, name: longer}, directory / WEIGHTS)
        message = _refusal(directory)
        assert f"{WEIGHTS}: tensor {name} has shape {tuple(longer.shape)}" in message
        assert str(tuple(tensors[name].shape)) in message
        assert "download config.json and the weights of one revision" in message


def test_a_tensor_that_holds_no_floats(directory: Path) -> None:
    name = _tensors_of_every_kind(directory)[-1]
    edit_tensors(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    message = _refusal(directory)
    assert f"{WEIGHTS}: tensor {name} is torch.int8" in message
    assert "use the bf16 release" in message


def test_missing_weights(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    message = _refusal(directory)
    assert str(directory / WEIGHTS) in message
    assert "download" in message


def test_a_missing_shard(directory: Path) -> None:
    shard_weights(directory)
    (directory / SHARD).unlink()
    message = _refusal(directory)
    assert str(directory / SHARD) in message
    assert "download" in message


@pytest.mark.parametrize("kept_bytes", [0, 4, 200, -1])
def test_a_truncated_file(kept_bytes: int, directory: Path) -> None:
    """Cut inside the header's length, the header, and the last tensor."""
    path = directory / WEIGHTS
    path.write_bytes(path.read_bytes()[:kept_bytes])
    message = _refusal(directory)
    assert f"{path}: damaged" in message
    assert "download the file again" in message


@pytest.mark.parametrize("kept_bytes", [0, 300, -1])
def test_a_truncated_shard(kept_bytes: int, directory: Path) -> None:
    shard_weights(directory)
    path = directory / SHARD
    path.write_bytes(path.read_bytes()[:kept_bytes])
    message = _refusal(directory)
    assert re.search(rf"{re.escape(str(path))}: tensor \S+ is damaged", message)
    assert "download the file again" in message


def test_an_index_that_names_a_missing_tensor(directory: Path) -> None:
    name = _tensors_of_every_kind(directory)[-1]
    shard_weights(directory)
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    other = next(file for file in sorted(weight_map.values()) if file != weight_map[name])
    (directory / INDEX).write_text(json.dumps({"weight_map": {**weight_map, name: other}}))
    message = _refusal(directory)
    assert f"{directory / other}: tensor {name} is damaged" in message
    assert "download the file again" in message


def test_an_index_without_a_tensor(directory: Path) -> None:
    name = _tensors_of_every_kind(directory)[-1]
    shard_weights(directory)
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    del weight_map[name]
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    message = _refusal(directory)
    assert f"{directory / INDEX}: tensor {name} is missing" in message
    assert "download" in message


@pytest.mark.parametrize("index", ["{}", "[]", "{", '{"weight_map": 3}'])
def test_a_damaged_index(index: str, directory: Path) -> None:
    (directory / INDEX).write_text(index)
    message = _refusal(directory)
    assert str(directory / INDEX) in message
    assert "download the file again" in message


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/outside.safetensors", "part/of.safetensors", "of.bin", "", 3]
)
def test_a_shard_that_is_no_file_of_the_directory(file: object, directory: Path) -> None:
    """The weights' digest is made of the directory's own files: others could be swapped unseen."""
    tensors = load_file(directory / WEIGHTS)
    for other in ("../outside.safetensors", "part/of.safetensors", "of.bin"):
        (directory / other).parent.mkdir(exist_ok=True)
        save_file(tensors, directory / other)
    (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
    message = _refusal(directory)
    assert f"{directory / INDEX}: tensor " in message
    assert f"stands in {file!r}, which is no .safetensors file of this directory" in message


def test_a_shard_that_is_a_folder(directory: Path) -> None:
    shard_weights(directory)
    (directory / SHARD).unlink()
    (directory / SHARD).mkdir()
    message = _refusal(directory)
    assert f"{directory / SHARD}: missing; download" in message


def test_no_checkpoint(tmp_path: Path) -> None:
    message = _refusal(tmp_path)
    assert str(tmp_path / "config.json") in message
    assert "Hugging Face checkpoint" in message


@pytest.mark.parametrize("content", ["{", "[]", '"text"', "\udcff"])
def test_a_damaged_config(content: str, directory: Path) -> None:
    (directory / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    message = _refusal(directory)
    assert str(directory / "config.json") in message
    assert "download the file again" in message


def test_an_unknown_model_type(directory: Path) -> None:
    edit_config(directory, model_type="mamba9")
    message = _refusal(directory)
    assert f"{directory / 'config.json'}: model_type 'mamba9' is not supported; use one of" in message
    assert all(model_type in message for family in FAMILIES for model_type in family.model_types)


@pytest.mark.parametrize("model_type", [[], {}, 3])
def test_a_model_type_that_is_no_name(model_type: object, directory: Path) -> None:
    edit_config(directory, model_type=model_type)
    assert f"{directory / 'config.json'}: model_type {model_type!r} is not supported; use one of" in _refusal(directory)


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("num_hidden_layers", 10**12, "must be at most"),
        ("vocab_size", 10**25, "must be at most"),
        ("vocab_size", None, "must be a positive integer"),
        ("hidden_size", "48", "must be a positive integer"),
        ("hidden_size", -48, "must be a positive integer"),
        ("rms_norm_eps", float("nan"), "must be a finite number"),
        ("rms_norm_eps", 10**400, "must be a finite number"),
        ("rms_norm_eps", -1e-6, "must be positive"),
    ],
)
def test_a_number_that_no_model_has(field: str, value: object, fault: str, directory: Path) -> None:
    edit_config(directory, **{field: value})
    message = _refusal(directory)
    assert message.startswith(f"config.json: {field} {fault}")


def test_a_config_nested_beyond_reason(directory: Path) -> None:
    depth = 100_000
    (directory / "config.json").write_text('{"a":' * depth + "1" + "}" * depth)
    assert "download the file again" in _refusal(directory)


def test_a_pattern_of_layers_that_is_not_understood(directory: Path) -> None:
    """`layer_types` is read wherever it stands, by families that need none too."""
    said = [name for name in PATTERNS if name in read_json(directory / "config.json")] or ["layer_types"]
    edit_config(directory, **{name: PATTERNS[name] for name in said})
    message = _refusal(directory)
    assert message.startswith("config.json: ")
    assert any(name in message for name in said)


def test_a_quantisation_that_is_not_supported(directory: Path) -> None:
    edit_config(directory, quantization_config={"quant_method": "gptq", "bits": 4})
    message = _refusal(directory)
    assert message.startswith("config.json: quantization_config.quant_method is 'gptq'")
    assert "use the bf16 release" in message
