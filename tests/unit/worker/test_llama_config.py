"""Configs of Llama and Qwen3 as releases write them, and what is refused in one line."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from services.worker.mixers.grouped_attention import GroupedAttentionShape
from services.worker.models.errors import CheckpointError
from services.worker.models.registry import read_checkpoint_spec
from services.worker.ops.rotary import Llama3Scaling
from tests.families import llama
from tests.models import CheckpointFactory
from tests.unit.worker.checkpoint_files import edit_config

_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def directory(checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    return Path(shutil.copytree(checkpoints.directory(llama.VARIANTS[0]), tmp_path / "checkpoint"))


def _attention(directory: Path) -> GroupedAttentionShape:
    mixer = read_checkpoint_spec(directory).layers[0].mixer
    assert isinstance(mixer, GroupedAttentionShape)
    return mixer


def test_released_files_name_base_and_scaling_apart(directory: Path) -> None:
    edit_config(directory, rope_parameters=None, rope_theta=500_000.0, rope_scaling=_SCALING)
    attention = _attention(directory)
    assert attention.rotary_theta == 500_000.0
    assert attention.rotary_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_what_early_releases_leave_out(directory: Path) -> None:
    """No rotary base, no head size, and every head with keys of its own."""
    edit_config(directory, rope_parameters=None, head_dim=None, num_key_value_heads=None)
    attention = _attention(directory)
    assert (attention.rotary_theta, attention.rotary_scaling) == (10_000.0, None)
    assert (attention.head_dim, attention.num_kv_heads) == (12, 4)


def test_nothing_but_keys_and_values_is_kept(directory: Path) -> None:
    spec = read_checkpoint_spec(directory)
    assert list(spec.states) == []
    assert spec.conv_history == 0
    assert spec.token_bytes(4) == 3 * 2 * 2 * 12 * 4


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"head_dim": 13}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_parameters": {**_SCALING, "factor": None}}, "factor"),
        ({"rope_parameters": {**_SCALING, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_fields(changes: dict[str, Any], field: str, directory: Path) -> None:
    edit_config(directory, **changes)
    with pytest.raises(CheckpointError, match=field) as caught:
        read_checkpoint_spec(directory)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)
