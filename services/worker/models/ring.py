"""Ring-linear-2.0 (`bailing_moe_linear`) and Ring-2.5 (`bailing_hybrid`), with the Ling models of the same shapes.

Groups of layers: lightning attention with partial rotary position, and behind it one layer of full attention, which is
grouped in Ring-linear-2.0 and latent in Ring-2.5; layers left over at the end are full attention. First layers are dense,
the others have experts. Prediction layers behind the last are ignored.

Sources: arXiv 2510.19338; the publisher's modelling file, github.com/inclusionAI/Ring-V2.5 (`models/`). From that file:
what layers are left over, that the number of groups of the output norm is `group_norm_size`, that latents are normed with
an epsilon of 1e-6, that latent attention turns interleaved pairs and lightning attention half-split ones, and that the
weight of a single chosen expert is its score. transformers 5.24 has neither family (its `bailing_hybrid` is Ling-3.0), so the
tests hold both to a reference of their own, written from these sources; no released weights have been run.

Refused: Ling-3.0, which shares the model type of Ring-2.5 but has linear layers of Kimi delta attention; rotary scalings,
biases, heads without norms, activated queries and keys, fewer linear keys than queries, routers other than sigmoid ones.

Open: the decay of a layer. The publisher's modelling file has the factor `1 − (l − 1) / (L − 1)`, with layers counted
from 0; what trains it (github.com/inclusionAI/AReaL) and serves it (SGLang, which the publisher's page has one use, and
vLLM) has `1 − l / (L − 1)`, which is the file's formula with layers counted from 1, as Megatron does. The second is taken;
`hypic_slope_layer_offset` in config.json, 0 or 1, chooses, and where it is missing a warning says so.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from services.worker.mixers.grouped_attention import (
    AttentionWeights,
    GroupedAttentionShape,
    create_grouped_attention,
)
from services.worker.mixers.latent_attention import LatentAttention, LatentAttentionShape
from services.worker.mixers.lightning import LightningShape, LightningWeights, create_lightning, layer_slopes
from services.worker.mixers.linear import LinearMixer
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.mixers.shapes import MixerShape
from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.decoder import Model, PreNormLayer
from services.worker.models.experts import ExpertNames, ExpertsShape, Routing, Scoring
from services.worker.models.fields import ConfigFields
from services.worker.models.latent_attention import read_latent_shape, read_latent_weights
from services.worker.models.spec import DenseShape, FeedForwardShape, LayerSpec, ModelSpec
from services.worker.models.weights import WeightReader, assemble
from services.worker.ops.rotary import Rotary

__all__ = ["MODEL_TYPES", "load_model", "read_spec"]

_LATENT_TYPE = "bailing_hybrid"
MODEL_TYPES = frozenset({"bailing_moe_linear", _LATENT_TYPE})
_KIMI_DELTA_FIELDS = ("short_conv_kernel_size", "kda_lower_bound", "kda_safe_gate", "no_kda_lora")
_LATENT_EPS = 1e-6
_NAMES = ExpertNames(bias="gate.expert_bias", shared="shared_experts")


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Shapes from `config.json`.

    Raises:
        CheckpointError: a field is missing or says something that this family does not support.
    """
    fields = ConfigFields(config)
    _refuse_other_forms(config, fields)
    eps = fields.positive("rms_norm_eps", 1e-6)
    layers, dense_layers = fields.few("num_hidden_layers"), fields.count("first_k_dense_replace")
    latent = config.get("model_type") == _LATENT_TYPE
    full = _latent(fields) if latent else _grouped(fields, eps)
    dense, experts = DenseShape(fields.integer("intermediate_size")), _experts(fields)
    group, offset = fields.integer("layer_group_size"), _slope_offset(fields)

    def mixer(layer: int) -> MixerShape:
        if (layer + 1) % group == 0 or layer >= layers // group * group:
            return full
        return _lightning(fields, layer_slopes(fields.integer("num_attention_heads"), layer, layers, offset), eps)

    return ModelSpec(
        family="ring_2_5" if latent else "ring_linear",
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        context_length=fields.integer("max_position_embeddings"),
        tied_head=fields.flag("tie_word_embeddings", False),
        eps=eps,
        layers=tuple(LayerSpec(mixer(each), dense if each < dense_layers else experts) for each in range(layers)),
    )


def _refuse_other_forms(config: Mapping[str, Any], fields: ConfigFields) -> None:
    """Everything that would change the numbers."""
    for name in _KIMI_DELTA_FIELDS:
        if config.get(name) is not None:
            raise fields.error(name, "belongs to Ling-3.0 (Kimi delta attention), which is not supported; Ring-2.5 is")
    for name in ("use_bias", "use_qkv_bias", "linear_silu", "use_linear_silu", "norm_head", "use_sliding_window"):
        fields.choice(name, [False], False)
    for name in ("use_qk_norm", "linear_rope", "use_rmsnorm"):
        fields.choice(name, [True], True)
    fields.choice("hidden_act", ["silu"], "silu")
    fields.choice("rope_scaling", [None], None)
    heads = fields.few("num_attention_heads")
    fields.choice("num_kv_heads_for_linear_attn", [0, heads], heads)


def _slope_offset(fields: ConfigFields) -> int:
    offset = fields.choice("hypic_slope_layer_offset", [None, 0, 1], None)
    if offset is None:
        warnings.warn(
            "config.json: hypic_slope_layer_offset is missing: linear layer l of L decays with the factor "
            "1 − l / (L − 1), as SGLang and vLLM have it; the publisher's modelling file has 1 − (l − 1) / (L − 1). "
            "Set it to 0 or 1 to choose",
            stacklevel=2,
        )
    return int(offset or 0)


def _head_dim(fields: ConfigFields) -> int:
    return fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))


def _rotary_dim(fields: ConfigFields) -> int:
    rotary_dim = int(_head_dim(fields) * fields.positive("partial_rotary_factor", 1.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= _head_dim(fields):
        raise fields.error("partial_rotary_factor", f"must turn an even number of channels, not {rotary_dim}")
    return rotary_dim


def _lightning(fields: ConfigFields, slopes: tuple[float, ...], eps: float) -> LightningShape:
    head_dim, groups = _head_dim(fields), fields.integer("group_norm_size", 1)
    if len(slopes) * head_dim % groups:
        raise fields.error("group_norm_size", f"must divide {len(slopes) * head_dim} channels")
    return LightningShape(
        head_dim=head_dim,
        slopes=slopes,
        query_scale=float(head_dim**-0.5),
        activated=False,
        norm_groups=groups,
        norm_eps=eps,
        eps=eps,
        rotary_dim=_rotary_dim(fields),
        rotary_theta=fields.positive("rope_theta"),
    )


def _grouped(fields: ConfigFields, eps: float) -> GroupedAttentionShape:
    fields.check_groups("num_attention_heads", "num_key_value_heads")
    return GroupedAttentionShape(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=_head_dim(fields),
        rotary_dim=_rotary_dim(fields),
        rotary_theta=fields.positive("rope_theta"),
        gated=False,
        eps=eps,
    )


def _latent(fields: ConfigFields) -> LatentAttentionShape:
    """The public code has one set of frequencies for both kinds of layers, so their rotary channels are as many."""
    fields.choice("rope_interleave", [True], True)
    fields.choice("qk_rope_head_dim", [_rotary_dim(fields)], None)
    return read_latent_shape(fields, rotary_theta=fields.positive("rope_theta"), eps=_LATENT_EPS)


def _experts(fields: ConfigFields) -> FeedForwardShape:
    for name in ("norm_topk_prob", "moe_router_enable_routed_scaling", "moe_router_enable_shared_expert"):
        fields.choice(name, [True], True)
    fields.choice("score_function", ["sigmoid"], "sigmoid")
    fields.choice("scoring_func", ["sigmoid"], "sigmoid")
    fields.choice("topk_method", ["noaux_tc"], "noaux_tc")
    fields.choice("router_dtype", ["fp32"], "fp32")
    size, shared = fields.integer("moe_intermediate_size"), fields.count("num_shared_experts")
    top_k = fields.integer("num_experts_per_tok")
    shared_size = shared * fields.integer("moe_shared_expert_intermediate_size", size)
    return ExpertsShape(
        size=size,
        routing=Routing(
            num_experts=fields.few("num_experts"),
            top_k=top_k,
            scoring=Scoring.SIGMOID,
            renormalised=top_k > 1,
            corrected=fields.flag("moe_router_enable_expert_bias", True),
            num_groups=fields.integer("n_group", 1),
            top_groups=fields.integer("topk_group", 1),
            scale=fields.positive("routed_scaling_factor", 1.0),
        ),
        shared_size=shared_size or None,
    )


def load_model(spec: ModelSpec, checkpoint: Checkpoint, memory: DeviceMemory) -> Model:
    """Weights onto the device, one layer at a time.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape.
    """
    reader = WeightReader(checkpoint, memory, ("model.",), "word_embeddings.weight")
    return assemble(spec, reader, lambda index: _layer(spec, reader, index), reader.read_fp32, "word_embeddings.weight")


def _layer(spec: ModelSpec, reader: WeightReader, index: int) -> PreNormLayer:
    name, own, hidden = f"layers.{index}", spec.layers[index], spec.hidden_size
    return PreNormLayer(
        mixer_norm=reader.read_fp32(f"{name}.input_layernorm.weight", hidden),
        mixer=_mixer(reader, f"{name}.attention", own.mixer, hidden),
        feed_forward_norm=reader.read_fp32(f"{name}.post_attention_layernorm.weight", hidden),
        feed_forward=reader.feed_forward(f"{name}.mlp", own.feed_forward, hidden, _NAMES),
        eps=spec.eps,
    )


def _mixer(reader: WeightReader, name: str, shape: MixerShape, hidden: int) -> LinearMixer | PagedAttention:
    if isinstance(shape, LightningShape):
        return _lightning_mixer(reader, name, shape, hidden)
    if isinstance(shape, GroupedAttentionShape):
        return _grouped_mixer(reader, name, shape, hidden)
    if isinstance(shape, LatentAttentionShape):
        return _latent_mixer(reader, name, shape, hidden)
    raise TypeError(f"{shape} is no shape of this family")


def _lightning_mixer(reader: WeightReader, name: str, shape: LightningShape, hidden: int) -> LinearMixer:
    channels, split = shape.channels, reader.rows(shape.channels)
    rows = {"query_key_value": reader.rows(channels, channels, channels), "g_proj": split}
    weights = LightningWeights(
        in_proj=reader.stack({f"{name}.{part}.weight": taken for part, taken in rows.items()}, hidden),
        norm=reader.read_fp32(f"{name}.g_norm.weight", channels, cut=split),
        out_proj=reader.read(f"{name}.dense.weight", hidden, channels, cut=reader.columns(channels)),
        q_norm=reader.read_fp32(f"{name}.query_layernorm.weight", shape.head_dim),
        k_norm=reader.read_fp32(f"{name}.key_layernorm.weight", shape.head_dim),
    )
    return create_lightning(shape.split(reader.share), weights, reader.memory)


def _grouped_mixer(reader: WeightReader, name: str, shape: GroupedAttentionShape, hidden: int) -> PagedAttention:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = reader.rows(queries) + reader.rows(keys, keys, share=shape.key_share(reader.share))
    weights = AttentionWeights(
        in_proj=reader.read(f"{name}.query_key_value.weight", rows.length, hidden, cut=rows),
        out_proj=reader.read(f"{name}.dense.weight", hidden, queries, cut=reader.columns(queries)),
        q_norm=reader.read_fp32(f"{name}.query_layernorm.weight", shape.head_dim),
        k_norm=reader.read_fp32(f"{name}.key_layernorm.weight", shape.head_dim),
    )
    return create_grouped_attention(shape.split(reader.share), weights, reader.memory)


def _latent_mixer(reader: WeightReader, name: str, shape: LatentAttentionShape, hidden: int) -> PagedAttention:
    if shape.rotary_theta is None:
        raise TypeError("latent attention of this family has rotary position")
    weights, own = read_latent_weights(reader, name, shape, hidden, out_proj="dense"), shape.split(reader.share)
    rotary = Rotary.create(shape.rotary_theta, shape.rope_dim, reader.memory.device, interleaved=True)
    return PagedAttention(LatentAttention(own, weights), rotary, reader.memory.add_page_pool(own.kept))
