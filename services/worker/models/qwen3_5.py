"""Qwen3.5, dense and with experts: three Gated DeltaNet layers to one gated full-attention layer.

Releases of Qwen3.6 carry the same model types and classes (github.com/guoqingbao/xinfer, issue 318); the tests hold configs of
Qwen3.5 alone.

Supported: text-only and multimodal checkpoints, whose vision towers and multi-token prediction heads are ignored; any pattern of
the two kinds of layer; experts in one tensor a layer (the bf16 releases) or one by one (the fp8 releases, and what
transformers saves), with softmax weights that are always renormalised, beside a gated shared expert.

Refused: rotary scalings, a missing rotary base, attention biases, other activations and output gates, dense layers among
expert ones.

Settled by transformers 5.24: for text the three position axes of interleaved multimodal rotary coincide, which makes it plain
half-split rotary; the attention's output gate is there whether or not `attn_output_gate` says so; fused experts are
`[E, 2 I, hidden]` with the gates first, and `[E, hidden, I]`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from services.worker.mixers.gated_delta import GatedDeltaShape
from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.decoder import Model
from services.worker.models.fields import ConfigFields
from services.worker.models.qwen_hybrid import load_hybrid, read_experts_shape, read_hybrid_spec
from services.worker.models.spec import DenseShape, FeedForwardShape, ModelSpec
from services.worker.models.weights import WeightReader

__all__ = ["MODEL_TYPES", "load_model", "read_spec"]

_DENSE = frozenset({"qwen3_5", "qwen3_5_text"})
MODEL_TYPES = _DENSE | {"qwen3_5_moe", "qwen3_5_moe_text"}
_PREFIXES = ("model.language_model.", "model.")


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Shapes from `config.json`.

    Raises:
        CheckpointError: a field is missing or says something that this family does not support.
    """
    whole = ConfigFields(config)
    text = whole.section("text_config") if whole.has("text_config") else whole
    tied_head = text.flag("tie_word_embeddings", whole.flag("tie_word_embeddings", False))
    is_dense = whole.choice("model_type", sorted(MODEL_TYPES), None) in _DENSE
    feed_forward = DenseShape(text.integer("intermediate_size")) if is_dense else _experts_shape(text)
    return read_hybrid_spec("qwen3_5" if is_dense else "qwen3_5_moe", text, tied_head, lambda _: feed_forward)


def _experts_shape(text: ConfigFields) -> FeedForwardShape:
    text.choice("norm_topk_prob", [True], True)
    text.choice("mlp_only_layers", [[]], [])
    text.choice("decoder_sparse_step", [1], 1)
    return read_experts_shape(text, renormalised=True)


def load_model(spec: ModelSpec, checkpoint: Checkpoint, memory: DeviceMemory) -> Model:
    """Weights onto the device, one layer at a time.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape.
    """
    return load_hybrid(spec, WeightReader(checkpoint, memory, _PREFIXES, "embed_tokens.weight"), _read_projection)


def _read_projection(reader: WeightReader, name: str, shape: GatedDeltaShape, hidden: int) -> torch.Tensor:
    heads, values = reader.rows(shape.num_value_heads), reader.rows(shape.num_value_heads * shape.value_dim)
    rows = {"qkv": reader.rows(*shape.conv_runs), "z": values, "b": heads, "a": heads}
    return reader.stack({f"{name}.in_proj_{part}.weight": taken for part, taken in rows.items()}, hidden)
