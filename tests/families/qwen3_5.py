"""Qwen3.5, dense."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tests.exactness.reference import Tokens, rotate
from tests.exactness.reference_model import Projections, ReferenceAttention, ReferenceFamily, ReferenceLinear
from tests.families.parts import PreNormLayer, TakenApart, heads
from tests.families.variant import FASTEST, SLOWEST, VOCAB_SIZE, Variant, randomise, transformers_library

__all__ = ["VARIANTS", "GatedAttentionReference", "GatedDeltaReference", "remember"]


def _build(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 # transformers ships no types
    base = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    }
    transformers = transformers_library()
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**base, **config)).eval()
    randomise(model)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            remember(layer.linear_attn)
    return model


@torch.no_grad()
def remember(mixer: Any) -> None:  # noqa: ANN401 # transformers ships no types
    """Slow gates of a gated delta layer: `softplus(a + dt_bias)` near 1, a head's rate between the two bounds."""
    count = mixer.A_log.shape[0]
    rates = torch.linspace(SLOWEST * 1.15, FASTEST * 0.85, count)
    mixer.A_log.copy_(rates.log())
    mixer.dt_bias.copy_(torch.full((count,), 0.5413))
    mixer.in_proj_a.weight.mul_(0.1)


class GatedDeltaReference(ReferenceLinear):
    """A gated delta layer with separate projections."""

    def __init__(self, public: Any) -> None:  # noqa: ANN401 # transformers ships no types
        self._public = public
        self.taps = public.conv1d.weight[:, 0]

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._public.in_proj_qkv(hidden)
        return rows

    def tokens(self, rows: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Tokens:
        own = self._public
        q, k, v = F.silu(rows).split([own.key_dim, own.key_dim, own.value_dim], dim=-1)
        repeats: int = own.num_v_heads // own.num_k_heads

        def unit(flat: torch.Tensor) -> torch.Tensor:
            split = heads(flat, own.num_k_heads)
            normed = split / (split.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            return normed.repeat_interleave(repeats, dim=1)

        steps = F.softplus(own.in_proj_a(hidden) + own.dt_bias)
        return Tokens(
            q=unit(q) * own.head_k_dim**-0.5,
            k=unit(k),
            v=heads(v, own.num_v_heads),
            decay=(-own.A_log.exp() * steps).exp(),
            beta=own.in_proj_b(hidden).sigmoid(),
        )

    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        own = self._public
        gate = heads(own.in_proj_z(hidden), own.num_v_heads)
        scale = (mixed.square().mean(-1, keepdim=True) + own.layer_norm_epsilon).rsqrt()
        outputs: torch.Tensor = own.out_proj((mixed * scale * own.norm.weight * F.silu(gate)).flatten(1))
        return outputs

    def public(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._public(hidden[None])[0]
        return outputs


class GatedAttentionReference(ReferenceAttention):
    """Grouped attention with query and key norms and an output gate."""

    def __init__(self, public: Any, config: Any) -> None:  # noqa: ANN401 # transformers ships no types
        self._public = public
        self._config = config
        self.scale = config.head_dim**-0.5

    def project(self, hidden: torch.Tensor) -> Projections:
        own, config = self._public, self._config
        queries, _ = heads(own.q_proj(hidden), config.num_attention_heads).chunk(2, dim=-1)
        keys = heads(own.k_proj(hidden), config.num_key_value_heads)
        return Projections(own.q_norm(queries), own.k_norm(keys), heads(own.v_proj(hidden), config.num_key_value_heads))

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rope = self._config.rope_parameters
        rotary_dim = int(self._config.head_dim * float(rope["partial_rotary_factor"]))
        return rotate(heads, positions, float(rope["rope_theta"]), rotary_dim)

    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        gate = heads(self._public.q_proj(hidden), self._config.num_attention_heads).chunk(2, dim=-1)[1]
        outputs: torch.Tensor = self._public.o_proj((mixed * gate.sigmoid()).flatten(1))
        return outputs


def _take_apart(public: Any) -> ReferenceFamily:  # noqa: ANN401 # transformers ships no types
    layers = [
        PreNormLayer(
            GatedDeltaReference(layer.linear_attn)
            if hasattr(layer, "linear_attn")
            else GatedAttentionReference(layer.self_attn, public.config),
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.mlp,
        )
        for layer in public.model.layers
    ]
    return TakenApart(public, layers)


_STANDARD = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
}
_ATTENTION_FIRST = {
    **_STANDARD,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
_WIDE_GROUPS = {
    **_STANDARD,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}

VARIANTS = (
    Variant("qwen3_5-standard", _build, _take_apart, _STANDARD),
    Variant("qwen3_5-attention-first", _build, _take_apart, _ATTENTION_FIRST),
    Variant("qwen3_5-wide-groups", _build, _take_apart, _WIDE_GROUPS),
)
