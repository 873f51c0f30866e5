"""What Qwen's linear hybrids share: Gated DeltaNet layers and gated full attention with partial rotary position, behind
zero-centred norms. A family says how its feed-forward blocks are chosen and how its linear layers' inputs are stored."""

from collections.abc import Callable

import torch

from services.worker.mixers.gated_delta import GatedDelta, GatedDeltaShape, GatedDeltaWeights
from services.worker.mixers.grouped_attention import GroupedAttentionShape
from services.worker.mixers.linear import LinearMixer
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.mixers.shapes import MixerShape
from services.worker.models.decoder import Model, PreNormLayer
from services.worker.models.experts import ExpertsShape, Routing, Scoring
from services.worker.models.fields import ConfigFields
from services.worker.models.grouped_attention import read_grouped_attention
from services.worker.models.spec import FeedForwardShape, LayerSpec, ModelSpec
from services.worker.models.weights import WeightReader, assemble

__all__ = ["ReadProjection", "load_hybrid", "read_experts_shape", "read_hybrid_spec"]

# A linear layer's name, shape and hidden size to `[q + k + v + z + b + a, hidden]`, this rank's heads of each in order.
ReadProjection = Callable[[WeightReader, str, GatedDeltaShape, int], torch.Tensor]


def read_hybrid_spec(
    family: str, fields: ConfigFields, tied_head: bool, feed_forward: Callable[[int], FeedForwardShape]
) -> ModelSpec:
    """Shapes from a config's fields; `feed_forward` is that of a layer by its index.

    Raises:
        CheckpointError: a field is missing or says something that these families do not support.
    """
    fields.choice("attention_bias", [False], False)
    fields.choice("attn_output_gate", [True], True)
    fields.choice("output_gate_type", ["swish"], "swish")
    fields.choice("hidden_act", ["silu"], "silu")
    fields.choice("use_sliding_window", [False], False)
    shapes: dict[str, MixerShape] = {
        "linear_attention": _linear_shape(fields),
        "full_attention": _attention_shape(fields),
    }
    kinds = _layer_types(fields, list(shapes))
    return ModelSpec(
        family=family,
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        context_length=fields.integer("max_position_embeddings"),
        tied_head=tied_head,
        eps=_eps(fields),
        layers=tuple(LayerSpec(shapes[kind], feed_forward(layer)) for layer, kind in enumerate(kinds)),
    )


def read_experts_shape(fields: ConfigFields, renormalised: bool) -> ExpertsShape:
    """Softmax routing beside a gated shared expert.

    Raises:
        CheckpointError: a field is missing or impossible.
    """
    routing = Routing(
        num_experts=fields.few("num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        scoring=Scoring.SOFTMAX,
        renormalised=renormalised,
    )
    shared = fields.integer("shared_expert_intermediate_size")
    size = fields.integer("moe_intermediate_size")
    return ExpertsShape(size, routing, shared, shared_gated=True, router_fp32=False)


def _eps(fields: ConfigFields) -> float:
    return fields.positive("rms_norm_eps", 1e-6)


def _linear_shape(fields: ConfigFields) -> GatedDeltaShape:
    fields.check_groups("linear_num_value_heads", "linear_num_key_heads")
    return GatedDeltaShape(
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_taps=fields.integer("linear_conv_kernel_dim"),
        eps=_eps(fields),
    )


def _attention_shape(fields: ConfigFields) -> GroupedAttentionShape:
    fields.check_groups("num_attention_heads", "num_key_value_heads")
    head_dim = fields.integer("head_dim")
    rope = fields.rope()
    rope.choice("rope_type" if rope.has("rope_type") else "type", ["default"], "default")
    # Releases before transformers 5 have these two beside the section.
    theta = (rope if rope.has("rope_theta") else fields).positive("rope_theta")
    factor = (rope if rope.has("partial_rotary_factor") else fields).positive("partial_rotary_factor", 0.25)
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise fields.error("partial_rotary_factor", f"must turn an even number of channels, not {rotary_dim}")
    return GroupedAttentionShape(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rotary_theta=theta,
        gated=True,
        eps=_eps(fields),
    )


def _layer_types(fields: ConfigFields, supported: list[str]) -> list[str]:
    layers = fields.few("num_hidden_layers")
    kinds = fields.names("layer_types", layers)
    if kinds is None:
        interval = fields.integer("full_attention_interval")
        return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    for kind in kinds:
        if kind not in supported:
            raise fields.error("layer_types", f"has {kind!r}; {' and '.join(supported)} are supported")
    return kinds


def load_hybrid(spec: ModelSpec, reader: WeightReader, read_projection: ReadProjection) -> Model:
    """Weights onto the device, one layer at a time.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape.
    """

    def layer(index: int) -> PreNormLayer:
        name, own = f"layers.{index}", spec.layers[index]
        mixer: LinearMixer | PagedAttention
        if isinstance(own.mixer, GatedDeltaShape):
            in_proj = read_projection(reader, f"{name}.linear_attn", own.mixer, spec.hidden_size)
            mixer = _linear(reader, f"{name}.linear_attn", own.mixer, in_proj)
        elif isinstance(own.mixer, GroupedAttentionShape):
            norms = reader.read_centred_norm
            mixer = read_grouped_attention(reader, f"{name}.self_attn", own.mixer, spec.hidden_size, norms)
        else:
            raise TypeError(f"{own.mixer} is no shape of these families")
        return PreNormLayer(
            mixer_norm=reader.read_centred_norm(f"{name}.input_layernorm.weight", spec.hidden_size),
            mixer=mixer,
            feed_forward_norm=reader.read_centred_norm(f"{name}.post_attention_layernorm.weight", spec.hidden_size),
            feed_forward=reader.feed_forward(f"{name}.mlp", own.feed_forward, spec.hidden_size),
            eps=spec.eps,
        )

    return assemble(spec, reader, layer, reader.read_centred_norm)


def _linear(reader: WeightReader, name: str, shape: GatedDeltaShape, in_proj: torch.Tensor) -> LinearMixer:
    heads, hidden = shape.num_value_heads, in_proj.shape[1]
    rows, values, own = reader.rows(*shape.conv_runs), heads * shape.value_dim, shape.split(reader.share)
    weights = GatedDeltaWeights(
        in_proj=in_proj,
        conv=reader.read(f"{name}.conv1d.weight", rows.length, 1, shape.conv_taps, cut=rows).squeeze(1),
        decay_rate=reader.read_fp32(f"{name}.A_log", heads, cut=reader.rows(heads)).exp(),
        dt_bias=reader.read_fp32(f"{name}.dt_bias", heads, cut=reader.rows(heads)),
        norm=reader.read(f"{name}.norm.weight", shape.value_dim),
        out_proj=reader.read(f"{name}.out_proj.weight", hidden, values, cut=reader.columns(values)),
    )
    return LinearMixer(own.kept, GatedDelta(own, weights), None, reader.memory.add_linear_slots(own.kept))
