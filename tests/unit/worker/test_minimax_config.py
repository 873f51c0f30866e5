"""Configs of MiniMax models in the released form and in that of transformers, and what is refused in one line."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.mixers.grouped_attention import GroupedAttentionShape
from services.worker.mixers.lightning import LightningShape, layer_slopes
from services.worker.models.errors import CheckpointError
from services.worker.models.registry import read_checkpoint_spec
from services.worker.models.spec import ResidualFactors
from tests.exactness.reference_model import Part, ReferenceModel
from tests.exactness.rig import assert_close, assert_far, draw_ids
from tests.families import minimax
from tests.models import CheckpointFactory, reference_logits
from tests.unit.worker.checkpoint_files import edit_config, last_logits

M1 = Path(__file__).parents[2] / "data" / "configs" / "MiniMax-M1-80k"
IDS = draw_ids(60, 1)
RELEASED_NAMES = {
    "linear_attn_alpha_factor": "layernorm_linear_attention_alpha",
    "linear_attn_beta_factor": "layernorm_linear_attention_beta",
    "full_attn_alpha_factor": "layernorm_full_attention_alpha",
    "full_attn_beta_factor": "layernorm_full_attention_beta",
    "mlp_alpha_factor": "layernorm_mlp_alpha",
    "mlp_beta_factor": "layernorm_mlp_beta",
}


@pytest.fixture
def directory(checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    return Path(shutil.copytree(checkpoints.directory(minimax.VARIANTS[0]), tmp_path / "checkpoint"))


@pytest.fixture
def released(directory: Path) -> Path:
    """The same checkpoint with the released form of its config."""
    config = json.loads((directory / "config.json").read_text())
    kinds = config.pop("layer_types")
    config.update(
        {
            **{released: config.pop(name) for name, released in RELEASED_NAMES.items()},
            "attn_type_list": [int(kind == "full_attention") for kind in kinds],
            "model_type": "minimax_m1",
            "postnorm": True,
            "rotary_dim": config["head_dim"],
            "rope_theta": config.pop("rope_parameters")["rope_theta"],
            "shared_intermediate_size": 0,
        }
    )
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_released_config() -> None:
    """MiniMax-M1: seven lightning layers to one of attention, of whose heads the first half turns."""
    spec = read_checkpoint_spec(M1)
    full = [index for index, layer in enumerate(spec.layers) if isinstance(layer.mixer, GroupedAttentionShape)]
    assert full == list(range(7, 80, 8))
    attention, lightning = spec.layers[7].mixer, spec.layers[6].mixer
    assert isinstance(attention, GroupedAttentionShape)
    assert (attention.rotary_dim, attention.rotary_theta) == (64, 1e7)
    assert isinstance(lightning, LightningShape)
    assert lightning.slopes == layer_slopes(64, 6, 80)
    assert spec.layers[0].residual == ResidualFactors(3.5565588200778455, 1.0, 3.5565588200778455, 1.0)


def test_the_released_form_says_the_same(released: Path, checkpoints: CheckpointFactory, device: torch.device) -> None:
    expected = reference_logits(checkpoints.model(minimax.VARIANTS[0]), IDS)[-1]
    assert_close(last_logits(released, device, IDS), expected)


@pytest.mark.parametrize("factor", RELEASED_NAMES.values())
def test_every_factor_matters(
    factor: str, released: Path, checkpoints: CheckpointFactory, device: torch.device
) -> None:
    edit_config(released, **{factor: 1.02})
    assert_far(last_logits(released, device, IDS), reference_logits(checkpoints.model(minimax.VARIANTS[0]), IDS)[-1])


def test_the_first_channels_of_a_head_turn(
    released: Path, checkpoints: CheckpointFactory, device: torch.device
) -> None:
    """What M1 has and transformers knows not: the reference says it, and whole heads would be seen."""
    edit_config(released, rotary_dim=8)
    public = copy.deepcopy(checkpoints.model(minimax.VARIANTS[0])).double()
    logits = last_logits(released, device, IDS)
    assert_close(logits, ReferenceModel(minimax.take_apart(public, rotary_dim=8)).logits([Part(IDS)])[-1])
    assert_far(logits, ReferenceModel(minimax.take_apart(public)).logits([Part(IDS)])[-1])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"postnorm": False}, "postnorm"),
        ({"postnorm": None}, "postnorm"),
        ({"attn_type_list": None}, "attn_type_list"),
        ({"attn_type_list": [0, 1]}, "attn_type_list"),
        ({"attn_type_list": [0, 1, 2, 1]}, "attn_type_list"),
        ({"num_attention_heads": 6}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rotary_dim": 18}, "rotary_dim"),
        ({"rotary_dim": 7}, "rotary_dim"),
        ({"shared_intermediate_size": 16}, "shared_intermediate_size"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "type"),
        ({"sliding_window": 1024}, "sliding_window"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_experts_per_tok": 9}, "experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_fields(changes: dict[str, Any], field: str, released: Path) -> None:
    edit_config(released, **changes)
    with pytest.raises(CheckpointError, match=field) as caught:
        read_checkpoint_spec(released)
    message = str(caught.value)
    assert "config.json" in message
    assert "\n" not in message
