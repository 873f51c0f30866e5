"""Qwen3.5 and Qwen3-Next as releases write them: nested configs, prefixes, fused experts, rotary fields in old places."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.mixers.grouped_attention import GroupedAttentionShape
from services.worker.mixers.state import DeviceMemory
from services.worker.models.errors import CheckpointError
from services.worker.models.experts import ExpertsShape
from services.worker.models.registry import load_checkpoint, read_checkpoint_spec
from services.worker.models.spec import DenseShape
from tests.exactness.rig import assert_close, draw_ids
from tests.families import qwen3_5, qwen3_next
from tests.models import CheckpointFactory, Variant, reference_logits
from tests.unit.worker.checkpoint_files import Tensors, edit_config, edit_tensors, fuse_experts, last_logits

IDS = draw_ids(70, 1)
DENSE, EXPERTS, NEXT = qwen3_5.VARIANTS[0], qwen3_5.VARIANTS[3], qwen3_next.VARIANTS[0]


def _copy(checkpoints: CheckpointFactory, variant: Variant, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints.directory(variant), tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    ("variant", "model_type"), [(DENSE, "qwen3_5"), (EXPERTS, "qwen3_5_moe")], ids=["dense", "experts"]
)
def test_multimodal_releases(
    variant: Variant, model_type: str, checkpoints: CheckpointFactory, tmp_path: Path, device: torch.device
) -> None:
    """Text weights under their multimodal prefix, experts fused, a vision tower and `mtp.*` beside them; nested config."""
    directory = _copy(checkpoints, variant, tmp_path)

    def rename(tensors: Tensors) -> None:
        fuse_experts(tensors)
        for name in list(tensors):
            if name.startswith("model."):
                tensors[f"model.language_model.{name.removeprefix('model.')}"] = tensors.pop(name)
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(4, 4)
        tensors["mtp.layers.0.mlp.gate_proj.weight"] = torch.zeros(4, 4)

    edit_tensors(directory, rename)
    path = directory / "config.json"
    path.write_text(json.dumps({"model_type": model_type, "text_config": json.loads(path.read_text())}))
    assert_close(last_logits(directory, device, IDS), reference_logits(checkpoints.model(variant), IDS)[-1])


def test_experts_in_both_layouts_at_once(checkpoints: CheckpointFactory, tmp_path: Path) -> None:
    """As two revisions leave them in one directory; nothing tells which was meant."""
    directory = _copy(checkpoints, EXPERTS, tmp_path)

    def keep_both(tensors: Tensors) -> None:
        single = dict(tensors)
        fuse_experts(tensors)
        tensors.update(single)

    edit_tensors(directory, keep_both)
    memory = DeviceMemory(torch.device("cpu"), torch.float32, num_pages=1, page_size=16, num_slots=1)
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj and .*experts\.0\.gate_proj\.weight both hold"):
        load_checkpoint(directory, memory)


def test_rotary_fields_beside_each_other(checkpoints: CheckpointFactory, tmp_path: Path) -> None:
    """Qwen3-Next's releases: no `rope_parameters`, and `rope_scaling` null or without effect."""
    directory = _copy(checkpoints, NEXT, tmp_path)
    for scaling in (None, {"type": "default"}):
        edit_config(directory, rope_parameters=None, rope_theta=5e6, partial_rotary_factor=0.5, rope_scaling=scaling)
        attention = read_checkpoint_spec(directory).layers[1].mixer
        assert isinstance(attention, GroupedAttentionShape)
        assert (attention.rotary_theta, attention.rotary_dim) == (5e6, 8)


def test_layer_types_follow_from_the_interval(checkpoints: CheckpointFactory, tmp_path: Path) -> None:
    directory = _copy(checkpoints, DENSE, tmp_path)
    layers = read_checkpoint_spec(directory).layers
    edit_config(directory, layer_types=None, full_attention_interval=3)
    assert read_checkpoint_spec(directory).layers == layers


@pytest.mark.parametrize(
    ("only", "step", "dense"), [([], 1, [0, 0, 0]), ([0, 2], 1, [1, 0, 1]), ([], 2, [1, 0, 1]), ([1], 2, [1, 1, 1])]
)
def test_which_layers_are_dense(
    only: list[int], step: int, dense: list[int], checkpoints: CheckpointFactory, tmp_path: Path
) -> None:
    directory = _copy(checkpoints, NEXT, tmp_path)
    edit_config(directory, mlp_only_layers=only, decoder_sparse_step=step)
    blocks = [layer.feed_forward for layer in read_checkpoint_spec(directory).layers]
    assert [int(isinstance(block, DenseShape)) for block in blocks] == dense
    assert {type(block) for block in blocks} <= {DenseShape, ExpertsShape}


ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("variant", "changes", "field"),
    [
        (DENSE, {"head_dim": None}, "head_dim"),
        (DENSE, {"hidden_size": "48"}, "hidden_size"),
        (DENSE, {"linear_key_head_dim": 0}, "linear_key_head_dim"),
        (DENSE, {"vocab_size": True}, "vocab_size"),
        (DENSE, {"attention_bias": True}, "attention_bias"),
        (DENSE, {"attn_output_gate": False}, "attn_output_gate"),
        (DENSE, {"output_gate_type": "sigmoid"}, "output_gate_type"),
        (DENSE, {"hidden_act": "gelu"}, "hidden_act"),
        (DENSE, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        (DENSE, {"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        (DENSE, {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.2}}, "partial_rotary_factor"),
        (DENSE, {"layer_types": ["linear_attention"]}, "layer_types"),
        (DENSE, {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        (DENSE, {"layer_types": None, "full_attention_interval": None}, "full_attention_interval"),
        (DENSE, {"linear_num_value_heads": 3}, "linear_num_value_heads"),
        (DENSE, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (EXPERTS, {"num_experts": None}, "num_experts"),
        (EXPERTS, {"num_experts_per_tok": 6}, "6 of 5 experts"),
        (EXPERTS, {"norm_topk_prob": False}, "norm_topk_prob"),
        (EXPERTS, {"mlp_only_layers": [1]}, "mlp_only_layers"),
        (EXPERTS, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (NEXT, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        (NEXT, {"mlp_only_layers": [3]}, "mlp_only_layers"),
        (NEXT, {"mlp_only_layers": [True]}, "mlp_only_layers"),
        (NEXT, {"mlp_only_layers": 1}, "mlp_only_layers"),
        (NEXT, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (NEXT, {"use_sliding_window": True}, "use_sliding_window"),
        (NEXT, {"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_fields(
    variant: Variant, changes: dict[str, Any], field: str, checkpoints: CheckpointFactory, tmp_path: Path
) -> None:
    directory = _copy(checkpoints, variant, tmp_path)
    edit_config(directory, **changes)
    with pytest.raises(CheckpointError, match=field) as caught:
        read_checkpoint_spec(directory)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)
