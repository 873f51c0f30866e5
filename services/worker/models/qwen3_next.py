"""Qwen3-Next: Qwen3.5's layers with experts by default, and the inputs of a linear layer fused and interleaved.

Supported: any pattern of the two kinds of layer; dense layers among expert ones by `mlp_only_layers` and `decoder_sparse_step`;
`rope_theta` and `partial_rotary_factor` in `rope_parameters` or, as in the releases, beside it; weights of experts renormalised
or not. Multi-token prediction heads are ignored.

Refused: rotary scalings, a missing rotary base, attention biases, sliding windows, other activations.

Settled by transformers 5.24: `in_proj_qkvz` and `in_proj_ba` are interleaved by key head, the convolution's channels are not.
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

MODEL_TYPES = frozenset({"qwen3_next"})


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Shapes from `config.json`.

    Raises:
        CheckpointError: a field is missing or says something that this family does not support.
    """
    fields = ConfigFields(config)
    dense_layers = fields.layers("mlp_only_layers", fields.few("num_hidden_layers"))
    step = fields.integer("decoder_sparse_step", 1)

    def feed_forward(layer: int) -> FeedForwardShape:
        if layer in dense_layers or (layer + 1) % step:
            return DenseShape(fields.integer("intermediate_size"))
        return read_experts_shape(fields, fields.flag("norm_topk_prob", True))

    return read_hybrid_spec("qwen3_next", fields, fields.flag("tie_word_embeddings", False), feed_forward)


def load_model(spec: ModelSpec, checkpoint: Checkpoint, memory: DeviceMemory) -> Model:
    """Weights onto the device, one layer at a time.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape.
    """
    return load_hybrid(spec, WeightReader(checkpoint, memory, ("model.",), "embed_tokens.weight"), _read_projection)


def _read_projection(reader: WeightReader, name: str, shape: GatedDeltaShape, hidden: int) -> torch.Tensor:
    """Key head by key head the file has q, k, and v and z of the value heads that it serves; likewise b and a."""
    values = shape.num_value_heads * shape.value_dim
    wide, narrow = reader.rows(shape.conv_channels + values), reader.rows(2 * shape.num_value_heads)
    qkvz = reader.read(f"{name}.in_proj_qkvz.weight", wide.length, hidden, cut=wide)
    ba = reader.read(f"{name}.in_proj_ba.weight", narrow.length, hidden, cut=narrow)
    own_values, num_key_heads = values // shape.num_key_heads, shape.split(reader.share).num_key_heads
    sizes = [shape.key_dim, shape.key_dim, own_values, own_values]
    parts = (
        *qkvz.unflatten(0, (num_key_heads, -1)).split(sizes, dim=1),
        *ba.unflatten(0, (num_key_heads, -1)).chunk(2, dim=1),
    )
    return torch.cat([part.flatten(0, 1) for part in parts])
