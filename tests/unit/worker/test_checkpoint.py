"""Checkpoints: what the public implementations write is served."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.exactness.rig import assert_close, draw_ids
from tests.models import VARIANTS, CheckpointFactory, Variant, reference_logits
from tests.unit.worker.checkpoint_files import edit_tensors, last_logits, shard_weights

IDS = draw_ids(70, 1)


@pytest.fixture
def directory(checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    return Path(shutil.copytree(checkpoints.directory(VARIANTS[0]), tmp_path / "checkpoint"))


def test_every_shape_loads(checkpoints: CheckpointFactory, variant: Variant, device: torch.device) -> None:
    expected = reference_logits(checkpoints.model(variant), IDS)[-1]
    assert_close(last_logits(checkpoints.directory(variant), device, IDS), expected)


def test_shards(directory: Path, checkpoints: CheckpointFactory, device: torch.device) -> None:
    shard_weights(directory)
    assert_close(last_logits(directory, device, IDS), reference_logits(checkpoints.model(VARIANTS[0]), IDS)[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_are_read_in_the_engines_dtype(
    dtype: torch.dtype, directory: Path, checkpoints: CheckpointFactory, device: torch.device
) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({name: each.to(dtype) for name, each in tensors.items()}))
    rounded = last_logits(directory, device, IDS)
    assert rounded.dtype == torch.float32
    assert_close(rounded, reference_logits(checkpoints.model(VARIANTS[0]), IDS)[-1], 0.2)
