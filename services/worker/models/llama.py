"""Llama and Qwen3, dense: full attention in every layer, rotary position over whole heads; Qwen3 norms queries and keys.

A segment of such a model is its keys and values alone: there is no recurrent state, transition or convolution tail.
Supported are one rotary base, unscaled or with the `llama3` scaling, and tied or separate output matrices. Other rotary
scalings, biases, sliding windows and interleaved rotary are refused. The tests hold both to transformers 5.24.
"""

from collections.abc import Mapping
from typing import Any

from services.worker.mixers.grouped_attention import GroupedAttentionShape
from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.decoder import Model, PreNormLayer
from services.worker.models.fields import ConfigFields
from services.worker.models.grouped_attention import read_grouped_attention
from services.worker.models.spec import DenseShape, LayerSpec, ModelSpec
from services.worker.models.weights import WeightReader, assemble
from services.worker.ops.rotary import Llama3Scaling

__all__ = ["MODEL_TYPES", "load_model", "read_spec"]

_LLAMA, _QWEN3 = "llama", "qwen3"
MODEL_TYPES = frozenset({_LLAMA, _QWEN3})
_DEFAULT_THETA = 10_000.0


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Shapes from `config.json`.

    Raises:
        CheckpointError: a field is missing or says something that this family does not support.
    """
    fields = ConfigFields(config)
    for name in ("attention_bias", "mlp_bias", "use_sliding_window", "rope_interleaved"):
        fields.choice(name, [False], False)
    fields.choice("hidden_act", ["silu"], "silu")
    num_layers = fields.few("num_hidden_layers")
    for kind in fields.names("layer_types", num_layers) or ():
        if kind != "full_attention":
            raise fields.error("layer_types", f"has {kind!r}; full_attention is supported")
    layer = LayerSpec(_attention_shape(fields), DenseShape(fields.integer("intermediate_size")))
    return ModelSpec(
        family=str(fields.choice("model_type", sorted(MODEL_TYPES), _LLAMA)),
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        context_length=fields.integer("max_position_embeddings"),
        tied_head=fields.flag("tie_word_embeddings", False),
        eps=fields.positive("rms_norm_eps", 1e-6),
        layers=(layer,) * num_layers,
    )


def _attention_shape(fields: ConfigFields) -> GroupedAttentionShape:
    fields.check_groups("num_attention_heads", "num_key_value_heads")
    num_heads = fields.few("num_attention_heads")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary position, not {head_dim}")
    rope = fields.rope()
    rope.choice("partial_rotary_factor", [1.0], 1.0)
    return GroupedAttentionShape(
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary_dim=head_dim,
        rotary_theta=rope.positive("rope_theta", fields.positive("rope_theta", _DEFAULT_THETA)),
        gated=False,
        eps=fields.positive("rms_norm_eps", 1e-6),
        rotary_scaling=_scaling(rope),
    )


def _scaling(rope: ConfigFields) -> Llama3Scaling | None:
    # Releases before `rope_type` named it `type`.
    kind = rope.choice("rope_type" if rope.has("rope_type") else "type", ["default", "llama3"], "default")
    if kind == "default":
        return None
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if not low < high:
        raise rope.error("high_freq_factor", f"must exceed low_freq_factor {low}, not {high}")
    return Llama3Scaling(rope.positive("factor"), low, high, rope.integer("original_max_position_embeddings"))


def load_model(spec: ModelSpec, checkpoint: Checkpoint, memory: DeviceMemory) -> Model:
    """Weights onto the device, one layer at a time.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape.
    """
    reader = WeightReader(checkpoint, memory, ("model.",), "embed_tokens.weight")
    return assemble(spec, reader, lambda index: _layer(spec, reader, index), reader.read_fp32)


def _layer(spec: ModelSpec, reader: WeightReader, index: int) -> PreNormLayer:
    name, own = f"layers.{index}", spec.layers[index]
    if not isinstance(own.mixer, GroupedAttentionShape) or not isinstance(own.feed_forward, DenseShape):
        raise TypeError(f"{own} is no layer of this family")
    read_norm = reader.read_fp32 if spec.family == _QWEN3 else None
    return PreNormLayer(
        mixer_norm=reader.read_fp32(f"{name}.input_layernorm.weight", spec.hidden_size),
        mixer=read_grouped_attention(reader, f"{name}.self_attn", own.mixer, spec.hidden_size, read_norm),
        feed_forward_norm=reader.read_fp32(f"{name}.post_attention_layernorm.weight", spec.hidden_size),
        feed_forward=reader.swiglu(f"{name}.mlp", own.feed_forward.size, spec.hidden_size),
        eps=spec.eps,
    )
