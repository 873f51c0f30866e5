"""Qwen3.5, dense: three Gated DeltaNet layers to one gated full-attention layer, partial rotary position.

Text-only and multimodal checkpoints are accepted; vision towers and multi-token prediction heads are ignored. For text the
three position axes of interleaved multimodal rotary coincide, which makes it plain half-split rotary.
"""

from collections.abc import Mapping
from typing import Any

from services.worker.mixers.gated_delta import GatedDelta, GatedDeltaShape, GatedDeltaWeights
from services.worker.mixers.grouped_attention import AttentionWeights, GroupedAttention, GroupedAttentionShape
from services.worker.mixers.linear import LinearMixer
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.mixers.shapes import MixerShape
from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.decoder import Model, PreNormLayer
from services.worker.models.fields import ConfigFields
from services.worker.models.spec import DenseShape, LayerSpec, ModelSpec
from services.worker.models.weights import WeightReader, assemble
from services.worker.ops.rotary import Rotary

__all__ = ["MODEL_TYPES", "load_model", "read_spec"]

MODEL_TYPES = frozenset({"qwen3_5", "qwen3_5_text"})
_PREFIXES = ("model.language_model.", "model.")


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Shapes from `config.json`.

    Raises:
        CheckpointError: a field is missing or says something that this family does not support.
    """
    text = config.get("text_config", config)
    fields = ConfigFields(text)
    rope = fields.section("rope_parameters")
    rope.choice("rope_type", ["default"], "default")
    fields.choice("attention_bias", [False], False)
    fields.choice("hidden_act", ["silu"], "silu")
    fields.check_groups("num_attention_heads", "num_key_value_heads")
    fields.check_groups("linear_num_value_heads", "linear_num_key_heads")
    eps = fields.number("rms_norm_eps", 1e-6)
    head_dim = fields.integer("head_dim")
    shapes: dict[str, MixerShape] = {
        "linear_attention": GatedDeltaShape(
            num_key_heads=fields.integer("linear_num_key_heads"),
            num_value_heads=fields.integer("linear_num_value_heads"),
            key_dim=fields.integer("linear_key_head_dim"),
            value_dim=fields.integer("linear_value_head_dim"),
            conv_taps=fields.integer("linear_conv_kernel_dim"),
            eps=eps,
        ),
        "full_attention": GroupedAttentionShape(
            num_heads=fields.integer("num_attention_heads"),
            num_kv_heads=fields.integer("num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=int(head_dim * rope.number("partial_rotary_factor", 0.25)),
            rotary_theta=rope.number("rope_theta", 1e7),
            gated=True,
            eps=eps,
        ),
    }
    feed_forward = DenseShape(fields.integer("intermediate_size"))
    return ModelSpec(
        family="qwen3_5",
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        context_length=fields.integer("max_position_embeddings"),
        tied_head=fields.flag("tie_word_embeddings", bool(config.get("tie_word_embeddings", False))),
        eps=eps,
        layers=tuple(LayerSpec(shapes[kind], feed_forward) for kind in _layer_types(fields, list(shapes))),
    )


def _layer_types(fields: ConfigFields, supported: list[str]) -> list[str]:
    layers = fields.integer("num_hidden_layers")
    kinds = fields.names("layer_types", layers)
    if kinds is None:
        interval = fields.integer("full_attention_interval")
        return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    for kind in kinds:
        if kind not in supported:
            raise fields.error("layer_types", f"has {kind!r}; {' and '.join(supported)} are supported")
    return kinds


def load_model(spec: ModelSpec, checkpoint: Checkpoint, memory: DeviceMemory) -> Model:
    """Weights onto the device, one layer at a time.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape.
    """
    reader = WeightReader(checkpoint, memory, _PREFIXES, "embed_tokens.weight")
    return assemble(spec, reader, lambda index: _layer(spec, reader, index), reader.read_centred_norm)


def _layer(spec: ModelSpec, reader: WeightReader, index: int) -> PreNormLayer:
    name, own = f"layers.{index}", spec.layers[index]
    mixer: LinearMixer | PagedAttention
    if isinstance(own.mixer, GatedDeltaShape):
        mixer = _linear(reader, f"{name}.linear_attn", own.mixer, spec.hidden_size)
    elif isinstance(own.mixer, GroupedAttentionShape):
        mixer = _attention(reader, f"{name}.self_attn", own.mixer, spec.hidden_size)
    else:
        raise TypeError(f"{own.mixer} is no shape of this family")
    return PreNormLayer(
        mixer_norm=reader.read_centred_norm(f"{name}.input_layernorm.weight", spec.hidden_size),
        mixer=mixer,
        feed_forward_norm=reader.read_centred_norm(f"{name}.post_attention_layernorm.weight", spec.hidden_size),
        feed_forward=reader.feed_forward(f"{name}.mlp", own.feed_forward, spec.hidden_size),
        eps=spec.eps,
    )


def _linear(reader: WeightReader, name: str, shape: GatedDeltaShape, hidden: int) -> LinearMixer:
    heads = shape.num_value_heads
    values = heads * shape.value_dim
    rows = {"qkv": shape.conv_channels, "z": values, "b": heads, "a": heads}
    weights = GatedDeltaWeights(
        in_proj=reader.stack({f"{name}.in_proj_{part}.weight": count for part, count in rows.items()}, hidden),
        conv=reader.read(f"{name}.conv1d.weight", shape.conv_channels, 1, shape.conv_taps).squeeze(1),
        decay_rate=reader.read_fp32(f"{name}.A_log", heads).exp(),
        dt_bias=reader.read_fp32(f"{name}.dt_bias", heads),
        norm=reader.read(f"{name}.norm.weight", shape.value_dim),
        out_proj=reader.read(f"{name}.out_proj.weight", hidden, values),
    )
    return LinearMixer(shape.kept, GatedDelta(shape, weights), None, reader.memory.add_linear_slots(shape.kept))


def _attention(reader: WeightReader, name: str, shape: GroupedAttentionShape, hidden: int) -> PagedAttention:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = {"q": 2 * queries, "k": keys, "v": keys}
    weights = AttentionWeights(
        in_proj=reader.stack({f"{name}.{part}_proj.weight": count for part, count in rows.items()}, hidden),
        out_proj=reader.read(f"{name}.o_proj.weight", hidden, queries),
        q_norm=reader.read_centred_norm(f"{name}.q_norm.weight", shape.head_dim),
        k_norm=reader.read_centred_norm(f"{name}.k_norm.weight", shape.head_dim),
    )
    rotary = Rotary.create(shape.rotary_theta, shape.rotary_dim, reader.memory.device)
    return PagedAttention(GroupedAttention(shape, weights), rotary, reader.memory.add_page_pool(shape.kept))
