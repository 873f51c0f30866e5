"""Kimi-Linear."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tests.exactness.reference import Tokens
from tests.exactness.reference_model import Projections, ReferenceAttention, ReferenceFamily, ReferenceLinear
from tests.families.parts import PreNormLayer, TakenApart, heads
from tests.families.variant import FASTEST, SLOWEST, VOCAB_SIZE, Variant, randomise, transformers_library

__all__ = ["VARIANTS", "LatentAttentionReference"]


def _build(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 # transformers ships no types
    base = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "model_max_length": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        # The grouped product that is taken otherwise knows no fp64.
        "experts_implementation": "eager",
    }
    transformers = transformers_library()
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**base, **config)).eval()
    randomise(model)
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "forget_gate"):
            _remember(layer.self_attn)
        if hasattr(layer.mlp, "gate"):
            _prefer(layer.mlp.gate.e_score_correction_bias)
    if model.config.tie_word_embeddings:
        _tie(model)
    return model


@torch.no_grad()
def _remember(mixer: Any) -> None:  # noqa: ANN401 # transformers ships no types
    """Slow gates: the slowest channel of a head has a rate between the two bounds, the fastest one three times that."""
    gate = mixer.forget_gate
    rates = torch.linspace(SLOWEST * 1.15, FASTEST * 0.85, mixer.num_heads)
    gate.A_log.copy_(rates.log().view(1, 1, -1, 1))
    steps = torch.linspace(1.0, 3.0, mixer.head_dim).repeat(mixer.num_heads)
    gate.dt_bias.copy_(steps.expm1().log())
    gate.f_b_proj.weight.mul_(0.05)


@torch.no_grad()
def _prefer(bias: torch.Tensor) -> None:
    """A correction of the router large enough to change what is chosen."""
    bias.copy_(0.3 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(8)))


@torch.no_grad()
def _tie(model: Any) -> None:  # noqa: ANN401 # transformers ships no types
    """The public class has no tied weights: its head is given the embedding's values."""
    model.lm_head.weight.copy_(model.model.embed_tokens.weight)


class KimiDeltaReference(ReferenceLinear):
    """A layer of Kimi delta attention."""

    def __init__(self, public: Any) -> None:  # noqa: ANN401 # transformers ships no types
        self._public = public
        self.taps = public.conv1d.weight[:, 0]

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self._public
        return torch.cat([own.q_proj(hidden), own.k_proj(hidden), own.v_proj(hidden)], dim=-1)

    def tokens(self, rows: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Tokens:
        own = self._public
        gate = own.forget_gate
        q, k, v = (heads(flat, own.num_heads) for flat in F.silu(rows).chunk(3, dim=-1))

        def unit(split: torch.Tensor) -> torch.Tensor:
            return split / (split.square().sum(-1, keepdim=True) + 1e-6).sqrt()

        steps = heads(F.softplus(gate.f_b_proj(gate.f_a_proj(hidden)) + gate.dt_bias), own.num_heads)
        return Tokens(
            q=unit(q) * own.head_dim**-0.5,
            k=unit(k),
            v=v,
            decay=(-gate.A_log[0].exp() * steps).exp(),
            beta=own.b_proj(hidden).sigmoid(),
        )

    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        own = self._public
        gate = heads(own.g_b_proj(own.g_a_proj(hidden)), own.num_heads)
        scale = (mixed.square().mean(-1, keepdim=True) + own.layer_norm_epsilon).rsqrt()
        outputs: torch.Tensor = own.o_proj((mixed * scale * own.o_norm.weight * gate.sigmoid()).flatten(1))
        return outputs

    def public(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._public(hidden[None])[0]
        return outputs


class LatentAttentionReference(ReferenceAttention):
    """Latent attention in its textbook form: every head's keys and values are expanded from the latent.

    The modules are named as in DeepSeek-V2. Nothing turns; the positional channels of a head are its last ones.
    """

    turns = False

    def __init__(self, public: Any) -> None:  # noqa: ANN401 # transformers ships no types
        self._public = public
        self.scale = (public.qk_nope_head_dim + public.qk_rope_head_dim) ** -0.5

    def project(self, hidden: torch.Tensor) -> Projections:
        own = self._public
        ranked = own.q_lora_rank is not None
        queries = own.q_b_proj(own.q_a_layernorm(own.q_a_proj(hidden))) if ranked else own.q_proj(hidden)
        latent, positional = own.kv_a_proj_with_mqa(hidden).split([own.kv_lora_rank, own.qk_rope_head_dim], dim=-1)
        expanded = heads(own.kv_b_proj(own.kv_a_layernorm(latent)), own.num_heads)
        keys, values = expanded.split([own.qk_nope_head_dim, own.v_head_dim], dim=-1)
        shared = positional[:, None].expand(-1, own.num_heads, -1)
        return Projections(heads(queries, own.num_heads), torch.cat([keys, shared], dim=-1), values)

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return heads

    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._public.o_proj(mixed.flatten(1))
        return outputs


def _take_apart(public: Any) -> ReferenceFamily:  # noqa: ANN401 # transformers ships no types
    layers = [
        PreNormLayer(
            KimiDeltaReference(layer.self_attn)
            if hasattr(layer.self_attn, "forget_gate")
            else LatentAttentionReference(layer.self_attn),
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.mlp,
        )
        for layer in public.model.layers
    ]
    return TakenApart(public, layers)


def _layers(kinds: str, heads: int, head_dim: int, taps: int) -> dict[str, Any]:
    """`k` a Kimi delta layer, `m` a latent attention layer; layers count from 1, as in the released config."""
    return {
        "kda_layers": [index + 1 for index, kind in enumerate(kinds) if kind == "k"],
        "full_attn_layers": [index + 1 for index, kind in enumerate(kinds) if kind == "m"],
        "num_heads": heads,
        "head_dim": head_dim,
        "short_conv_kernel_size": taps,
    }


_STANDARD = {
    "num_hidden_layers": 4,
    "linear_attn_config": _layers("kkmk", heads=2, head_dim=24, taps=4),
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
}
_ATTENTION_FIRST = {
    **_STANDARD,
    "num_hidden_layers": 3,
    "linear_attn_config": _layers("mkm", heads=3, head_dim=16, taps=3),
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 14,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 9,
    "qk_rope_head_dim": 6,
    "v_head_dim": 16,
    "tie_word_embeddings": True,
    "first_k_dense_replace": 0,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}

VARIANTS = (
    Variant("kimi_linear-standard", _build, _take_apart, _STANDARD),
    Variant("kimi_linear-attention-first", _build, _take_apart, _ATTENTION_FIRST),
)
