"""Configs of Ring models as releases write them, the open question of their decays, and what is refused in one line."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.mixers.grouped_attention import GroupedAttentionShape
from services.worker.mixers.latent_attention import LatentAttentionShape
from services.worker.mixers.lightning import LightningShape, layer_slopes
from services.worker.models.errors import CheckpointError
from services.worker.models.experts import ExpertsShape
from services.worker.models.registry import read_checkpoint_spec
from services.worker.models.ring import read_spec
from services.worker.models.spec import DenseShape
from tests.exactness.rig import assert_close, assert_far, draw_ids
from tests.families import ring
from tests.models import CheckpointFactory, reference_logits
from tests.unit.worker.checkpoint_files import edit_config, edit_tensors, last_logits

IDS = draw_ids(60, 1)
RING_MINI_LINEAR = {
    "model_type": "bailing_moe_linear",
    "first_k_dense_replace": 1,
    "group_norm_size": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "layer_group_size": 5,
    "linear_silu": False,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 512,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "vocab_size": 157184,
    "hypic_slope_layer_offset": 0,
}


@pytest.fixture
def directory(checkpoints: CheckpointFactory, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    return Path(shutil.copytree(checkpoints.directory(ring.VARIANTS[0]), tmp_path / "checkpoint"))


def test_the_released_config() -> None:
    """Ring-mini-linear-2.0: every fifth layer is full attention, the first layer dense."""
    spec = read_spec(RING_MINI_LINEAR)
    full = [index for index, layer in enumerate(spec.layers) if isinstance(layer.mixer, GroupedAttentionShape)]
    assert full == [4, 9, 14, 19]
    assert [index for index, layer in enumerate(spec.layers) if isinstance(layer.feed_forward, DenseShape)] == [0]
    lightning, experts = spec.layers[3].mixer, spec.layers[3].feed_forward
    assert isinstance(lightning, LightningShape)
    assert lightning.slopes == layer_slopes(16, 3, 20)
    assert (lightning.rotary_dim, lightning.norm_groups, lightning.query_scale) == (64, 4, 128**-0.5)
    assert isinstance(experts, ExpertsShape)
    assert (experts.shared_size, experts.routing.num_groups, experts.routing.scale) == (512, 8, 2.5)


def test_layers_left_over_are_full_attention() -> None:
    spec = read_spec({**RING_MINI_LINEAR, "num_hidden_layers": 22})
    kinds = [isinstance(layer.mixer, GroupedAttentionShape) for layer in spec.layers]
    assert [index for index, full in enumerate(kinds) if full] == [4, 9, 14, 19, 20, 21]


RING_2_5 = {
    **RING_MINI_LINEAR,
    "model_type": "bailing_hybrid",
    "first_k_dense_replace": 4,
    "group_norm_size": 8,
    "hidden_size": 8192,
    "intermediate_size": 18432,
    "layer_group_size": 8,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}


def test_the_published_shape_of_ring_2_5() -> None:
    """One latent layer in eight, four dense layers; the config is put together from public ports."""
    spec = read_spec({**RING_2_5, "moe_shared_expert_intermediate_size": 2048})
    full = [index for index, layer in enumerate(spec.layers) if isinstance(layer.mixer, LatentAttentionShape)]
    assert full == list(range(7, 80, 8))
    assert sum(isinstance(layer.feed_forward, DenseShape) for layer in spec.layers) == 4
    assert spec.token_bytes(2) == 10 * 2 * (512 + 64)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_interleave": False}, "rope_interleave"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"short_conv_kernel_size": 4}, "Ling-3.0"),
        ({"no_kda_lora": True}, "Ling-3.0"),
    ],
)
def test_what_ring_2_5_does_not_do(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError, match=field):
        read_spec({**RING_2_5, **changes})


def test_the_choice_of_decays_changes_the_answer(
    directory: Path, checkpoints: CheckpointFactory, device: torch.device
) -> None:
    expected = reference_logits(checkpoints.model(ring.VARIANTS[0]), IDS)[-1]
    assert_close(last_logits(directory, device, IDS), expected)
    edit_config(directory, hypic_slope_layer_offset=0)
    assert_far(last_logits(directory, device, IDS), expected)


def test_decays_that_nobody_chose_are_warned_of(directory: Path) -> None:
    edit_config(directory, hypic_slope_layer_offset=0)
    chosen = read_checkpoint_spec(directory)
    edit_config(directory, hypic_slope_layer_offset=None)
    with pytest.warns(UserWarning, match="hypic_slope_layer_offset") as caught:
        assert read_checkpoint_spec(directory) == chosen
    assert "\n" not in str(caught[0].message)


def test_prediction_layers_are_ignored(directory: Path, checkpoints: CheckpointFactory, device: torch.device) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": torch.zeros(48, 96)}))
    edit_config(directory, num_nextn_predict_layers=1)
    assert_close(last_logits(directory, device, IDS), reference_logits(checkpoints.model(ring.VARIANTS[0]), IDS)[-1])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"short_conv_kernel_size": 4}, "Ling-3.0"),
        ({"kda_lower_bound": -5.0}, "Ling-3.0"),
        ({"use_qkv_bias": True}, "use_qkv_bias"),
        ({"use_bias": True}, "use_bias"),
        ({"use_qk_norm": False}, "use_qk_norm"),
        ({"linear_silu": True}, "linear_silu"),
        ({"linear_rope": False}, "linear_rope"),
        ({"norm_head": True}, "norm_head"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling"),
        ({"num_kv_heads_for_linear_attn": 2}, "num_kv_heads_for_linear_attn"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"group_norm_size": 5}, "group_norm_size"),
        ({"score_function": "softmax"}, "score_function"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"router_dtype": "bf16"}, "router_dtype"),
        ({"topk_group": 5}, "groups"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"hypic_slope_layer_offset": 2}, "hypic_slope_layer_offset"),
        ({"layer_group_size": None}, "layer_group_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_fields(changes: dict[str, Any], field: str, directory: Path) -> None:
    edit_config(directory, **changes)
    with pytest.raises(CheckpointError, match=field) as caught:
        read_checkpoint_spec(directory)
    message = str(caught.value)
    assert "config.json" in message
    assert "\n" not in message
