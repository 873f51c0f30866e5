"""Kimi-Linear's config and names: what the released checkpoint says is read, and what would change a number is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.engine.combine_plan import CombinePart
from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from services.worker.mixers.kimi_delta import KimiDeltaShape
from services.worker.models.errors import CheckpointError
from services.worker.models.kimi_linear import read_spec
from services.worker.models.spec import DenseShape
from tests.exactness.rig import PassRig, assert_close, create_context, draw_ids
from tests.families.kimi_linear import VARIANTS
from tests.models import CheckpointFactory, reference_logits

CONFIG = {
    "model_type": "kimi_linear",
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "model_max_length": 2048,
    "rms_norm_eps": 1e-5,
    "mla_use_nope": True,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446,
    "use_grouped_topk": True,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
        "num_heads": 2,
        "head_dim": 24,
        "short_conv_kernel_size": 4,
    },
}


def test_lists_count_layers_from_one() -> None:
    spec = read_spec(CONFIG)
    assert [isinstance(layer.mixer, KimiDeltaShape) for layer in spec.layers] == [True, False, True]
    assert spec.conv_history == 3


def test_a_latent_is_one_head_a_token() -> None:
    """28 numbers a token in one layer, whatever the number of heads."""
    assert read_spec(CONFIG).token_bytes(2) == 2 * 28


@pytest.mark.parametrize("dense", [0, 1, 3, 9])
def test_dense_layers_come_first(dense: int) -> None:
    spec = read_spec({**CONFIG, "first_k_dense_replace": dense})
    assert [isinstance(layer.feed_forward, DenseShape) for layer in spec.layers] == [
        index < dense for index in range(3)
    ]


def test_a_checkpoint_without_experts_needs_no_router() -> None:
    dense = {name: value for name, value in CONFIG.items() if "expert" not in name and not name.startswith("moe_")}
    assert read_spec({**dense, "first_k_dense_replace": 3}).layers


def _linear(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 # any JSON
    section = CONFIG["linear_attn_config"]
    assert isinstance(section, dict)
    return {"linear_attn_config": {**section, **changes}}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"linear_attn_config": None}, "linear_attn_config.num_heads"),
        (_linear(kda_layers=None), "linear_attn_config.kda_layers"),
        (_linear(kda_layers=[1, "3"]), "linear_attn_config.kda_layers"),
        (_linear(kda_layers=[0, 2], full_attn_layers=[1]), "1 to 3"),
        (_linear(kda_layers=[1, 2, 3]), "1 to 3"),
        (_linear(kda_layers=[1]), "1 to 3"),
        (_linear(head_dim=0), "linear_attn_config.head_dim"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"model_max_length": None}, "model_max_length"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace"),
        ({"first_k_dense_replace": False}, "first_k_dense_replace"),
        ({"mlp_layer_types": ["dense", "dense", "sparse"]}, "mlp_layer_types"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor"),
        ({"num_experts_per_token": 1}, "moe_renormalize"),
        ({"num_expert_group": 2, "use_grouped_topk": False}, "use_grouped_topk"),
        ({"num_experts": 5, "num_expert_group": 2}, "groups"),
        ({"num_shared_experts": 0}, "num_shared_experts"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"routed_expert_hidden_size": 24}, "routed_expert_hidden_size"),
        (_linear(gate_lower_bound=-5.0), "linear_attn_config.gate_lower_bound"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_fields(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_spec({**CONFIG, **changes})
    message = str(caught.value)
    assert "\n" not in message
    assert field in message


def test_the_released_name_of_the_dense_block(
    checkpoints: CheckpointFactory, tmp_path: Path, device: torch.device
) -> None:
    """The release keeps it under `mlp`, where transformers writes `block_sparse_moe`."""
    variant = VARIANTS[0]
    directory = Path(shutil.copytree(checkpoints.directory(variant), tmp_path / "released"))
    tensors = load_file(directory / "model.safetensors")
    written = "layers.0.block_sparse_moe.gate_proj.weight"
    assert f"model.{written}" in tensors
    released = {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): tensor for name, tensor in tensors.items()}
    save_file(released, directory / "model.safetensors")
    ids = draw_ids(30, 1)
    rig = PassRig(create_context(directory, device, CaptureProfile(SeamWindow(4), ())))
    assert_close(rig.logits(CombinePart(ids)), reference_logits(checkpoints.model(variant), ids)[-1])
