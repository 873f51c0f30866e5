"""Kimi-Linear: layers of Kimi delta attention and of multi-head latent attention, neither with rotary position.

Supported: dense and expert layers, `q_lora_rank`, any layer pattern. `linear_attn_config` lists the kind of every layer,
counted from 1, and is required, as is `first_k_dense_replace`: the defaults of public code differ from the released
checkpoint and from each other. Tensors carry the released names; feed-forward blocks stand under `mlp` or
`block_sparse_moe`, since transformers saves the dense ones under the name of the expert ones.

Refused: rotary position (`mla_use_nope` false), fewer key than query heads, biases, softmax routers, expert layers that are
not all behind the dense ones, one renormalised expert a token (public code disagrees on its weight), and what later models
add under the same names (bounded decays, output gates of latent attention, experts of another width than the model's).

Settled by the released code as public ports quote it (revision 6e163f3) and by transformers 5.24: the norms of the latents
use an epsilon of 1e-6 whatever `rms_norm_eps` says; the router's bias chooses and does not weigh; the shared block is not
scaled; `w1` is an expert's gate, `w3` its up, `w2` its down projection.
"""

from collections.abc import Mapping
from typing import Any

import torch

from services.worker.mixers.kimi_delta import KimiDelta, KimiDeltaShape, KimiDeltaWeights
from services.worker.mixers.latent_attention import LatentAttention, LatentAttentionShape
from services.worker.mixers.linear import LinearMixer
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.mixers.shapes import MixerShape
from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.cuts import Cut
from services.worker.models.decoder import Model, PreNormLayer
from services.worker.models.experts import ExpertNames, ExpertsShape, Routing, Scoring
from services.worker.models.fields import ConfigFields
from services.worker.models.latent_attention import read_latent_shape, read_latent_weights
from services.worker.models.spec import DenseShape, FeedForwardShape, LayerSpec, ModelSpec
from services.worker.models.weights import WeightReader, assemble

__all__ = ["MODEL_TYPES", "load_model", "read_spec"]

MODEL_TYPES = frozenset({"kimi_linear"})
_LINEAR, _FULL = "linear_attention", "full_attention"
_LATENT_EPS = 1e-6
_EXPERT_NAMES = ExpertNames(gate="w1", up="w3", down="w2", shared="shared_experts")


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Shapes from `config.json`.

    Raises:
        CheckpointError: a field is missing or says something that this family does not support.
    """
    fields = ConfigFields(config)
    fields.choice("hidden_act", ["silu"], "silu")
    layers = fields.few("num_hidden_layers")
    return ModelSpec(
        family="kimi_linear",
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        context_length=fields.integer("model_max_length"),
        tied_head=fields.flag("tie_word_embeddings", False),
        eps=fields.positive("rms_norm_eps"),
        layers=tuple(map(LayerSpec, _mixers(fields, layers), _feed_forwards(fields, layers))),
    )


def _mixers(fields: ConfigFields, layers: int) -> list[MixerShape]:
    fields.choice("mla_use_nope", [True], True)
    fields.choice("mla_use_output_gate", [False], False)
    linear = fields.section("linear_attn_config")
    linear.choice("gate_lower_bound", [None], None)
    delta = KimiDeltaShape(
        num_heads=linear.integer("num_heads"),
        head_dim=linear.integer("head_dim"),
        conv_taps=linear.integer("short_conv_kernel_size"),
        eps=fields.positive("rms_norm_eps"),
    )
    latent = read_latent_shape(fields, rotary_theta=None, eps=_LATENT_EPS)
    return [delta if kind == _LINEAR else latent for kind in _layer_types(fields, linear, layers)]


def _layer_types(fields: ConfigFields, linear: ConfigFields, layers: int) -> list[str]:
    """The kind of every layer; `layer_types`, which transformers writes beside the lists, must say the same."""
    linear_layers, attention_layers = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    if sorted(linear_layers + attention_layers) != list(range(1, layers + 1)):
        raise linear.error("kda_layers", f"and full_attn_layers must list each of the layers 1 to {layers} once")
    kinds = [_LINEAR if layer + 1 in linear_layers else _FULL for layer in range(layers)]
    if fields.names("layer_types", layers) not in (None, kinds):
        raise fields.error("layer_types", "contradicts linear_attn_config; remove it")
    return kinds


def _feed_forwards(fields: ConfigFields, layers: int) -> list[FeedForwardShape]:
    """Dense blocks first, experts behind them; `mlp_layer_types`, which transformers writes, must say the same."""
    dense = min(fields.count("first_k_dense_replace"), layers)
    kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    if fields.names("mlp_layer_types", layers) not in (None, kinds):
        raise fields.error("mlp_layer_types", "contradicts first_k_dense_replace; remove it")
    shapes: list[FeedForwardShape] = [DenseShape(fields.integer("intermediate_size"))] * dense
    return shapes if dense == layers else [*shapes, *[_experts(fields)] * (layers - dense)]


def _experts(fields: ConfigFields) -> ExpertsShape:
    fields.choice("moe_router_activation_func", ["sigmoid"], "sigmoid")
    fields.choice("moe_layer_freq", [1], 1)
    fields.choice("routed_expert_hidden_size", [None], None)
    routing = Routing(
        num_experts=fields.few("num_experts"),
        top_k=fields.integer("num_experts_per_token"),
        scoring=Scoring.SIGMOID,
        renormalised=fields.flag("moe_renormalize", True),
        corrected=True,
        num_groups=fields.integer("num_expert_group", 1),
        top_groups=fields.integer("topk_group", 1),
        scale=fields.positive("routed_scaling_factor"),
    )
    if routing.top_k == 1 and routing.renormalised:
        raise fields.error("moe_renormalize", "has no agreed meaning with one expert a token")
    if routing.num_groups > 1:
        fields.choice("use_grouped_topk", [True], True)
    size = fields.integer("moe_intermediate_size")
    shared = fields.optional_integer("num_shared_experts")
    return ExpertsShape(size, routing, None if shared is None else shared * size)


def load_model(spec: ModelSpec, checkpoint: Checkpoint, memory: DeviceMemory) -> Model:
    """Weights onto the device, one layer at a time.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape.
    """
    reader = WeightReader(checkpoint, memory, ("model.",), "embed_tokens.weight")
    return assemble(spec, reader, lambda index: _layer(spec, reader, index), reader.read_fp32)


def _layer(spec: ModelSpec, reader: WeightReader, index: int) -> PreNormLayer:
    name, own = f"layers.{index}", spec.layers[index]
    mixer: LinearMixer | PagedAttention
    if isinstance(own.mixer, KimiDeltaShape):
        mixer = _linear(reader, f"{name}.self_attn", own.mixer, spec.hidden_size)
    elif isinstance(own.mixer, LatentAttentionShape):
        weights = read_latent_weights(reader, f"{name}.self_attn", own.mixer, spec.hidden_size)
        shape = own.mixer.split(reader.share)
        mixer = PagedAttention(LatentAttention(shape, weights), None, reader.memory.add_page_pool(shape.kept))
    else:
        raise TypeError(f"{own.mixer} is no shape of this family")
    dense = f"{name}.mlp"
    block = dense if reader.has(f"{dense}.gate_proj.weight") else f"{name}.block_sparse_moe"
    return PreNormLayer(
        mixer_norm=reader.read_fp32(f"{name}.input_layernorm.weight", spec.hidden_size),
        mixer=mixer,
        feed_forward_norm=reader.read_fp32(f"{name}.post_attention_layernorm.weight", spec.hidden_size),
        feed_forward=reader.feed_forward(block, own.feed_forward, spec.hidden_size, _EXPERT_NAMES),
        eps=spec.eps,
    )


def _linear(reader: WeightReader, name: str, shape: KimiDeltaShape, hidden: int) -> LinearMixer:
    channels, inner, heads = shape.channels, shape.head_dim, shape.num_heads
    own, split = shape.split(reader.share), reader.rows(channels)
    heads_cut = Cut.of((heads,), reader.share, axis=2)
    all_inner = reader.all_rows(inner)
    rows = {"q": split, "k": split, "v": split, "f_a": all_inner, "g_a": all_inner, "b": reader.rows(heads)}
    weights = KimiDeltaWeights(
        in_proj=reader.stack({f"{name}.{part}_proj.weight": taken for part, taken in rows.items()}, hidden),
        conv=torch.cat(
            [reader.read(f"{name}.{part}_conv1d.weight", channels, 1, shape.conv_taps, cut=split) for part in "qkv"]
        )[:, 0],
        decay_up=reader.read(f"{name}.f_b_proj.weight", channels, inner, cut=split),
        decay_rate=reader.read_fp32(f"{name}.A_log", 1, 1, heads, 1, cut=heads_cut).exp().view(-1, 1),
        dt_bias=reader.read_fp32(f"{name}.dt_bias", channels, cut=split).view(own.num_heads, inner),
        gate_up=reader.read(f"{name}.g_b_proj.weight", channels, inner, cut=split),
        norm=reader.read_fp32(f"{name}.o_norm.weight", inner),
        out_proj=reader.read(f"{name}.o_proj.weight", hidden, channels, cut=reader.columns(channels)),
    )
    return LinearMixer(own.kept, KimiDelta(own, weights), None, reader.memory.add_linear_slots(own.kept))
