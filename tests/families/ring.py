"""Ring-linear-2.0 and Ring-2.5, over the stand-in for their public code."""

from collections.abc import Mapping
from typing import Any

import torch

from tests.exactness.reference import Tokens, rotate
from tests.exactness.reference_model import Projections, ReferenceAttention, ReferenceFamily, ReferenceLinear
from tests.families.parts import PreNormLayer, TakenApart
from tests.families.ring_public import GroupedAttention, LatentAttention, Lightning, Ring
from tests.families.variant import VOCAB_SIZE, Variant, randomise

__all__ = ["VARIANTS"]


def _build(config: Mapping[str, Any]) -> Ring:
    base = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 24,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "num_attention_heads": 4,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
    }
    model = Ring({**base, **config}).eval()
    randomise(model)
    return model


class LightningReference(ReferenceLinear):
    """A lightning layer with rotary position."""

    turns = True

    def __init__(self, public: Lightning) -> None:
        self._public = public

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(heads, positions, self._public.config.rope_theta, self._public.rotary_dim)

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._public.query_key_value(hidden)
        return rows

    def tokens(self, rows: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Tokens:
        own = self._public
        q, k, v = own.split(hidden)
        return Tokens(
            q=self._rotate(q, positions) * own.config.head_dim**-0.5,
            k=self._rotate(k, positions),
            v=v,
            decay=(-own.slopes).exp().expand(len(rows), -1),
            beta=None,
        )

    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self._public.finish(mixed, hidden)

    def public(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._public(hidden)
        return outputs

    def turn(self, state: torch.Tensor, places: int) -> torch.Tensor:
        """The keys `[H, K]` behind each value channel turn together."""
        columns = state.permute(2, 0, 1)
        return self._rotate(columns, torch.full((len(columns),), places)).permute(1, 2, 0)


class GroupedReference(ReferenceAttention):
    """Grouped attention with query and key norms."""

    def __init__(self, public: GroupedAttention) -> None:
        self._public = public
        self.scale = public.config.head_dim**-0.5

    def project(self, hidden: torch.Tensor) -> Projections:
        return Projections(*self._public.split(hidden))

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(heads, positions, self._public.config.rope_theta, self._public.rotary_dim)

    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._public.dense(mixed.flatten(1))
        return outputs


class LatentReference(ReferenceAttention):
    """Latent attention in the textbook form, keys and values expanded; positional channels stand first."""

    def __init__(self, public: LatentAttention) -> None:
        self._public = public
        self.scale = public.query_dim**-0.5

    def project(self, hidden: torch.Tensor) -> Projections:
        return Projections(*self._public.split(hidden))

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Neighbours turn as halves do once even channels stand ahead of odd ones, in queries and keys alike."""
        config = self._public.config
        turned, rest = heads.tensor_split([config.qk_rope_head_dim], dim=-1)
        ordered = torch.cat([turned[..., 0::2], turned[..., 1::2], rest], dim=-1)
        return rotate(ordered, positions, config.rope_theta, config.qk_rope_head_dim)

    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._public.dense(mixed.flatten(1))
        return outputs


def _reference(attention: Any) -> ReferenceLinear | ReferenceAttention:  # noqa: ANN401 # one of three modules
    match attention:
        case Lightning():
            return LightningReference(attention)
        case LatentAttention():
            return LatentReference(attention)
        case _:
            return GroupedReference(attention)


def _take_apart(public: Any) -> ReferenceFamily:  # noqa: ANN401 # modules are looked up by name
    layers = [
        PreNormLayer(
            _reference(layer.attention),
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.mlp,
        )
        for layer in public.model.layers
    ]
    return TakenApart(public, layers)


_LINEAR = {
    "model_type": "bailing_moe_linear",
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "group_norm_size": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "hypic_slope_layer_offset": 1,
}
# One layer stands behind the last full group, which makes it a layer of full attention.
_LINEAR_TAIL = {
    **_LINEAR,
    "num_key_value_heads": 1,
    "layer_group_size": 3,
    "first_k_dense_replace": 2,
    "group_norm_size": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": True,
    "hypic_slope_layer_offset": 0,
}
_LATENT = {
    **_LINEAR,
    "model_type": "bailing_hybrid",
    "num_key_value_heads": 4,
    "layer_group_size": 3,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rope_interleave": True,
}
_LATENT_FULL_QUERIES = {
    **_LATENT,
    "num_hidden_layers": 3,
    "layer_group_size": 2,
    "first_k_dense_replace": 0,
    "num_experts_per_tok": 1,
    "q_lora_rank": None,
    "v_head_dim": 20,
    "hypic_slope_layer_offset": 0,
}

VARIANTS = (
    Variant("ring-linear-group", _build, _take_apart, _LINEAR),
    Variant("ring-linear-tail", _build, _take_apart, _LINEAR_TAIL),
    Variant("ring-2.5-low-rank", _build, _take_apart, _LATENT),
    Variant("ring-2.5-full-queries", _build, _take_apart, _LATENT_FULL_QUERIES),
)
