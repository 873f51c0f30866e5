"""MiniMax-M1 and MiniMax-Text-01: lightning attention, every eighth layer grouped attention, experts in every layer.

Served are the released checkpoints (`attn_type_list`, `layernorm_*`) and those that transformers writes (`layer_types`,
`*_factor`); public loaders read the tensors of both by the same names, which are those that transformers saves. Norms stand
ahead of the residual: both a block's input and its output are scaled. The output norm of lightning layers has an epsilon of
1e-6, as in the released and in transformers' code; vLLM has 1e-5.

Position is rotary in attention layers alone. As the released code has it, the first `rotary_dim` channels of a head turn, half
of them in MiniMax-M1; a config without the field means whole heads, which is all that transformers does. Fewer channels are
therefore held to the tests' own reference.

Decays count layers from 0 in the released code, transformers, vLLM and SGLang alike; transformers divides by `L − 1 + 1e-5`
where the others have `L − 1`, which shows in a last layer alone, were it linear. For numbers of heads that are no power of
two they disagree, so such configs are refused; so are residuals ahead of the norm, shared experts, rotary scalings, sliding
windows and biases. Sources: arXiv 2506.13585, arXiv 2501.08313; transformers' `minimax`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from services.worker.mixers.grouped_attention import GroupedAttentionShape
from services.worker.mixers.lightning import LightningShape, LightningWeights, create_lightning, layer_slopes
from services.worker.mixers.linear import LinearMixer
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import Checkpoint
from services.worker.models.decoder import Model, PostNormLayer
from services.worker.models.experts import ExpertNames, ExpertsShape, Routing, Scoring
from services.worker.models.fields import ConfigFields
from services.worker.models.grouped_attention import read_grouped_attention
from services.worker.models.spec import LayerSpec, ModelSpec, ResidualFactors
from services.worker.models.weights import WeightReader, assemble

__all__ = ["MODEL_TYPES", "load_model", "read_spec"]

MODEL_TYPES = frozenset({"minimax", "minimax_m1", "MiniMaxM1", "minimax_text_01", "MiniMaxText01"})
_LINEAR, _FULL = "linear_attention", "full_attention"
_LIGHTNING_EPS = 1e-6
_NAMES = ExpertNames(gate="w1", up="w3", down="w2")
# What transformers calls a factor, and what the released configs call it.
_FACTORS = {
    _LINEAR: ("linear_attn_{}_factor", "layernorm_linear_attention_{}"),
    _FULL: ("full_attn_{}_factor", "layernorm_full_attention_{}"),
    "mlp": ("mlp_{}_factor", "layernorm_mlp_{}"),
}


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Shapes from `config.json`.

    Raises:
        CheckpointError: a field is missing or says something that this family does not support.
    """
    fields = ConfigFields(config)
    _refuse_other_forms(fields)
    eps, experts = fields.positive("rms_norm_eps", 1e-5), _experts(fields)
    heads, kinds = fields.integer("num_attention_heads"), _layer_kinds(fields)
    full = _attention(fields, eps)

    def layer(index: int, kind: str) -> LayerSpec:
        mixer = _lightning(fields, layer_slopes(heads, index, len(kinds)), eps) if kind == _LINEAR else full
        return LayerSpec(mixer, experts, _residual(fields, kind))

    return ModelSpec(
        family="minimax",
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        context_length=fields.integer("max_position_embeddings"),
        tied_head=fields.flag("tie_word_embeddings", False),
        eps=eps,
        layers=tuple(layer(index, kind) for index, kind in enumerate(kinds)),
    )


def _refuse_other_forms(fields: ConfigFields) -> None:
    """Everything that would change the numbers."""
    # Released code takes the residual ahead of the norm unless it is told otherwise; transformers always behind it.
    fields.choice("postnorm", [True], fields.has("layer_types"))
    for name in ("attention_bias", "use_qk_norm"):
        fields.choice(name, [False], False)
    fields.choice("hidden_act", ["silu"], "silu")
    fields.choice("shared_intermediate_size", [0], 0)
    fields.choice("sliding_window", [None], None)
    fields.check_groups("num_attention_heads", "num_key_value_heads")
    heads = fields.few("num_attention_heads")
    if heads & (heads - 1):
        raise fields.error(
            "num_attention_heads", f"must be a power of two, not {heads}: public code disagrees on decays"
        )


def _layer_kinds(fields: ConfigFields) -> list[str]:
    layers = fields.few("num_hidden_layers")
    name = "layer_types" if fields.has("layer_types") else "attn_type_list"
    kinds = fields.names(name, layers)
    if kinds is None:
        raise fields.error(name, f"must list {layers} layers")
    known = {"0": _LINEAR, "1": _FULL, _LINEAR: _LINEAR, _FULL: _FULL}
    for kind in kinds:
        if kind not in known:
            raise fields.error(name, f"has {kind!r}; {_LINEAR} (0) and {_FULL} (1) are supported")
    return [known[kind] for kind in kinds]


def _residual(fields: ConfigFields, kind: str) -> ResidualFactors:
    mixer, feed_forward = (
        [fields.number(ours.format(half), fields.number(released.format(half), 1.0)) for half in ("alpha", "beta")]
        for ours, released in (_FACTORS[kind], _FACTORS["mlp"])
    )
    return ResidualFactors(*mixer, *feed_forward)


def _head_dim(fields: ConfigFields) -> int:
    return fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))


def _lightning(fields: ConfigFields, slopes: tuple[float, ...], eps: float) -> LightningShape:
    return LightningShape(
        head_dim=_head_dim(fields),
        slopes=slopes,
        query_scale=1.0,
        activated=True,
        norm_groups=1,
        norm_eps=_LIGHTNING_EPS,
        eps=eps,
    )


def _attention(fields: ConfigFields, eps: float) -> GroupedAttentionShape:
    rope = fields.rope()
    rope.choice("rope_type" if rope.has("rope_type") else "type", ["default"], "default")
    rotary_dim = fields.integer("rotary_dim", _head_dim(fields))
    if rotary_dim % 2 or rotary_dim > _head_dim(fields):
        raise fields.error("rotary_dim", f"must turn an even number of channels of a head, not {rotary_dim}")
    return GroupedAttentionShape(
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.integer("num_key_value_heads", fields.integer("num_attention_heads")),
        head_dim=_head_dim(fields),
        rotary_dim=rotary_dim,
        rotary_theta=(rope if rope.has("rope_theta") else fields).positive("rope_theta"),
        gated=False,
        eps=eps,
    )


def _experts(fields: ConfigFields) -> ExpertsShape:
    return ExpertsShape(
        size=fields.integer("intermediate_size"),
        routing=Routing(
            num_experts=fields.few("num_local_experts"),
            top_k=fields.integer("num_experts_per_tok"),
            scoring=Scoring.SOFTMAX,
            renormalised=True,
        ),
    )


def load_model(spec: ModelSpec, checkpoint: Checkpoint, memory: DeviceMemory) -> Model:
    """Weights onto the device, one layer at a time.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape.
    """
    reader = WeightReader(checkpoint, memory, ("model.",), "embed_tokens.weight")
    return assemble(spec, reader, lambda index: _layer(spec, reader, index), reader.read_fp32)


def _layer(spec: ModelSpec, reader: WeightReader, index: int) -> PostNormLayer:
    name, own, hidden = f"layers.{index}", spec.layers[index], spec.hidden_size
    mixer: LinearMixer | PagedAttention
    if isinstance(own.mixer, LightningShape):
        mixer = _lightning_mixer(reader, f"{name}.self_attn", own.mixer, hidden)
    elif isinstance(own.mixer, GroupedAttentionShape):
        mixer = read_grouped_attention(reader, f"{name}.self_attn", own.mixer, hidden)
    else:
        raise TypeError(f"{own.mixer} is no shape of this family")
    if own.residual is None:
        raise TypeError("a layer of this family scales its residual")
    return PostNormLayer(
        mixer_norm=reader.read_fp32(f"{name}.input_layernorm.weight", hidden),
        mixer=mixer,
        feed_forward_norm=reader.read_fp32(f"{name}.post_attention_layernorm.weight", hidden),
        feed_forward=reader.feed_forward(f"{name}.block_sparse_moe", own.feed_forward, hidden, _NAMES),
        factors=own.residual,
        eps=spec.eps,
    )


def _lightning_mixer(reader: WeightReader, name: str, shape: LightningShape, hidden: int) -> LinearMixer:
    """Rows of q, k and v stand head by head in the checkpoint; here all of q stands ahead of all of k."""
    channels, split = shape.channels, reader.rows(shape.channels)
    by_head = reader.read(f"{name}.qkv_proj.weight", 3 * channels, hidden, cut=reader.rows(3 * channels))
    qkv = by_head.unflatten(0, (-1, 3, shape.head_dim)).transpose(0, 1).flatten(0, 2)
    gate = reader.read(f"{name}.output_gate.weight", channels, hidden, cut=split)
    weights = LightningWeights(
        in_proj=torch.cat([qkv, gate]),
        norm=reader.read_fp32(f"{name}.norm.weight", channels, cut=split),
        out_proj=reader.read(f"{name}.out_proj.weight", hidden, channels, cut=reader.columns(channels)),
    )
    return create_lightning(shape.split(reader.share), weights, reader.memory)
