"""Checkpoints in fp8 with block scales give the logits of the same weights dequantised; any other quantisation is refused."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.inspection.report import inspect_checkpoint
from services.worker.models.errors import CheckpointError
from services.worker.models.quantisation import BlockScales
from tests.exactness.rig import assert_far, draw_ids
from tests.families import qwen3_5
from tests.models import CheckpointFactory, Variant
from tests.unit.worker.checkpoint_files import (
    Tensors,
    edit_config,
    edit_tensors,
    fuse_experts,
    last_logits,
    shard_weights,
)

IDS = draw_ids(40, 1)
NAME = "model.layers.0.linear_attn.in_proj_qkv.weight"
SCALES = f"{NAME}_scale_inv"
LARGEST = 448.0


def _config(rows: int, columns: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [rows, columns],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }


def _is_quantised(name: str, tensor: torch.Tensor) -> bool:
    """Matrices, fused experts among them; not embeddings, heads, norms, gates or convolutions."""
    is_matrix = tensor.ndim == 2 or name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return is_matrix and not any(word in name for word in ("embed", "lm_head"))


def _quantise(tensors: Tensors, rows: int, columns: int, scale_dtype: torch.dtype = torch.float32) -> Tensors:
    """In place, block by block; returns the tensors as they should be read."""
    dequantised = dict(tensors)
    for name, tensor in list(tensors.items()):
        if not _is_quantised(name, tensor):
            continue
        scales = torch.empty(*tensor.shape[:-2], -(-tensor.shape[-2] // rows), -(-tensor.shape[-1] // columns))
        stored, read = torch.empty_like(tensor, dtype=torch.float8_e4m3fn), torch.empty_like(tensor)
        for row in range(scales.shape[-2]):
            for column in range(scales.shape[-1]):
                block = (..., slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
                scale = (tensor[block].abs().amax((-2, -1)) / LARGEST).to(scale_dtype)
                scales[..., row, column] = scale
                stored[block] = (
                    (tensor[block] / scale.float()[..., None, None]).clamp(-LARGEST, LARGEST).to(stored.dtype)
                )
                read[block] = stored[block].float() * scale.float()[..., None, None]
        tensors[name], tensors[f"{name}_scale_inv"], dequantised[name] = stored, scales.to(scale_dtype), read
    return dequantised


def _pair(source: Path, tmp_path: Path, rows: int, columns: int, *, is_fused: bool = False) -> tuple[Path, Path]:
    """Two directories: quantised, and dequantised by hand."""
    quantised, plain = (Path(shutil.copytree(source, tmp_path / name)) for name in ("quantised", "plain"))
    kept: Tensors = {}

    def quantise(tensors: Tensors) -> None:
        if is_fused:
            fuse_experts(tensors)
        kept.update(_quantise(tensors, rows, columns, torch.bfloat16 if is_fused else torch.float32))

    def replace(tensors: Tensors) -> None:
        tensors.clear()
        tensors.update(kept)

    edit_tensors(quantised, quantise)
    edit_config(quantised, quantization_config=_config(rows, columns))
    edit_tensors(plain, replace)
    return quantised, plain


def test_logits_are_those_of_the_dequantised_weights(
    checkpoints: CheckpointFactory, variant: Variant, tmp_path: Path, device: torch.device
) -> None:
    """Blocks of 16 × 32 leave ragged edges on hidden states of 48 channels. Control: the weights before quantising."""
    quantised, plain = _pair(checkpoints.directory(variant), tmp_path, 16, 32)
    logits = last_logits(quantised, device, IDS)
    assert torch.equal(logits, last_logits(plain, device, IDS))
    assert_far(logits, last_logits(checkpoints.directory(variant), device, IDS))


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (1, 48), (7, 5)])
def test_block_sizes_and_fused_experts(
    rows: int, columns: int, checkpoints: CheckpointFactory, tmp_path: Path, device: torch.device
) -> None:
    """Blocks larger than a matrix, rows of their own, and sizes that divide nothing; scales in bf16."""
    source = checkpoints.directory(qwen3_5.VARIANTS[3])
    quantised, plain = _pair(source, tmp_path, rows, columns, is_fused=True)
    assert torch.equal(last_logits(quantised, device, IDS), last_logits(plain, device, IDS))


def test_every_block_has_its_own_scale() -> None:
    """Against plain loops, with scales that all differ; a block transposed or moved by one would be seen."""
    weight = torch.arange(-30.0, 30.0).reshape(3, 4, 5).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 13.0).reshape(3, 2, 2)
    blocks = BlockScales(2, 3)
    assert blocks.shape(tuple(weight.shape)) == tuple(scales.shape)
    expected = torch.stack(
        [
            torch.tensor([[float(one[r, c].float() * scale[r // 2, c // 3]) for c in range(5)] for r in range(4)])
            for one, scale in zip(weight, scales, strict=True)
        ]
    )
    assert torch.equal(blocks.dequantise(weight, scales), expected)


@pytest.fixture
def directory(checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    """A quantised checkpoint of one's own."""
    return _pair(checkpoints.directory(qwen3_5.VARIANTS[0]), tmp_path, 16, 32)[0]


def _refusal(directory: Path, device: torch.device) -> str:
    with pytest.raises(CheckpointError) as caught:
        last_logits(directory, device, IDS)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_missing_scales(directory: Path, device: torch.device) -> None:
    edit_tensors(directory, lambda tensors: tensors.__delitem__(SCALES))
    message = _refusal(directory, device)
    assert f"model.safetensors: tensor {SCALES} is missing" in message
    assert "download" in message
    report = inspect_checkpoint(directory)
    assert report.weights is not None
    assert report.weights.missing == (SCALES,)


def test_scales_of_another_shape(directory: Path, device: torch.device) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({SCALES: tensors[SCALES].T}))
    message = _refusal(directory, device)
    assert f"tensor {SCALES} has shape (2, 9) where config.json implies (9, 2)" in message
    report = inspect_checkpoint(directory)
    assert report.weights is not None
    assert [fault.name for fault in report.weights.wrong_shape] == [SCALES]


def _convert(name: str, dtype: torch.dtype, tensors: Tensors) -> None:
    tensors[name] = tensors[name].float().to(dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e8m0fnu, torch.float8_e5m2])
def test_scales_or_weights_of_another_kind(dtype: torch.dtype, directory: Path, device: torch.device) -> None:
    for name in (SCALES, NAME):
        edit_tensors(directory, partial(_convert, name, dtype))
        message = _refusal(directory, device)
        assert f"tensor {name} is {dtype}" in message
        assert "use the bf16 release" in message


def test_quantised_weights_that_the_config_does_not_announce(directory: Path, device: torch.device) -> None:
    edit_config(directory, quantization_config=None)
    message = _refusal(directory, device)
    assert "is torch.float8_e4m3fn" in message
    assert "quantization_config" in message


def test_shards_of_quantised_weights(directory: Path, device: torch.device) -> None:
    """A weight and its scales may stand in two files."""
    expected = last_logits(directory, device, IDS)
    shard_weights(directory)
    assert torch.equal(last_logits(directory, device, IDS), expected)


def test_what_is_said_of_a_quantised_checkpoint(directory: Path) -> None:
    report = inspect_checkpoint(directory)
    assert report.weights is not None
    assert report.weights.is_servable
    assert report.weights.unexpected == ()
    assert report.unknown_fields == ()


BLOCKS = _config(16, 32)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method"),
        ({"quantization_config": {**BLOCKS, "weight_block_size": None}}, "quantization_config.weight_block_size"),
        ({"quantization_config": {**BLOCKS, "weight_block_size": [16]}}, "quantization_config.weight_block_size"),
        ({"quantization_config": {**BLOCKS, "weight_block_size": [0, 32]}}, "quantization_config.weight_block_size"),
        ({"quantization_config": {**BLOCKS, "fmt": "e5m2"}}, "quantization_config.fmt"),
        ({"quantization_config": {**BLOCKS, "activation_scheme": "static"}}, "quantization_config.activation_scheme"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization"),
        ({"compression_config": {"format": "pack-quantized"}}, "compression_config"),
        ({"quantization_config": None, "text_config": {"quantization_config": {"quant_method": "awq"}}}, "quant_method"),
    ],
    ids=str,
)  # fmt: skip
def test_other_quantisations(changes: dict[str, Any], field: str, directory: Path, device: torch.device) -> None:
    edit_config(directory, **changes)
    message = _refusal(directory, device)
    assert message.startswith("config.json: ")
    assert field in message
    assert "use the bf16 release" in message
