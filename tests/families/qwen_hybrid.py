"""What Qwen3.5 and Qwen3-Next share: gated delta layers and gated attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.exactness.reference import Tokens, rotate
from tests.exactness.reference_model import Projections, ReferenceAttention, ReferenceFamily, ReferenceLinear
from tests.families.parts import PreNormLayer, TakenApart, heads
from tests.families.variant import FASTEST, SLOWEST, VOCAB_SIZE, Variant, randomise, transformers_library

__all__ = ["HEADS", "hybrid_variants"]


Public = Any  # transformers ships no types

HEADS: Mapping[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}


def hybrid_variants(family: str, configs: Mapping[str, Mapping[str, Any]]) -> tuple[Variant, ...]:
    """Variants by name; the family as transformers begins the names of its classes."""
    return tuple(Variant(name, partial(_build, family), _take_apart, config) for name, config in configs.items())


def _build(family: str, config: Mapping[str, Any]) -> Public:
    base = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        "num_hidden_layers": len(config["layer_types"]),
    }
    transformers = transformers_library()
    text = "Text" if hasattr(transformers, f"{family}TextConfig") else ""
    settings = getattr(transformers, f"{family}{text}Config")(**base, **config)
    model = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
    randomise(model)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            _remember(layer.linear_attn)
    return model


@torch.no_grad()
def _remember(mixer: Public) -> None:
    """Slow gates of a gated delta layer: `softplus(a + dt_bias)` near 1, a head's rate between the two bounds."""
    count = mixer.A_log.shape[0]
    rates = torch.linspace(SLOWEST * 1.15, FASTEST * 0.85, count)
    mixer.A_log.copy_(rates.log())
    mixer.dt_bias.copy_(torch.full((count,), 0.5413))
    if hasattr(mixer, "in_proj_a"):
        mixer.in_proj_a.weight.mul_(0.1)
    else:
        mixer.in_proj_ba.weight.unflatten(0, (mixer.num_k_heads, 2, -1))[:, 1].mul_(0.1)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a gated delta layer projects: rows `[N, C]` of q, k and v; gate `[N, Hv, V]`; beta and step `[N, Hv]`."""

    rows: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    step: torch.Tensor


def _separate(public: Public, hidden: torch.Tensor) -> _Inputs:
    gate = heads(public.in_proj_z(hidden), public.num_v_heads)
    return _Inputs(public.in_proj_qkv(hidden), gate, public.in_proj_b(hidden), public.in_proj_a(hidden))


def _fused(public: Public, hidden: torch.Tensor) -> _Inputs:
    """Qwen3-Next's projections, put in order by the public module itself."""
    fused = public.in_proj_qkvz(hidden[None]), public.in_proj_ba(hidden[None])
    q, k, v, gate, beta, step = (part[0] for part in public.fix_query_key_value_ordering(*fused))
    return _Inputs(torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1), gate, beta, step)


class _GatedDelta(ReferenceLinear):
    """A gated delta layer, its projections separate or fused."""

    def __init__(self, public: Public) -> None:
        self._public = public
        self._project = _separate if hasattr(public, "in_proj_qkv") else _fused
        self.taps = public.conv1d.weight[:, 0]

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._project(self._public, hidden).rows

    def tokens(self, rows: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Tokens:
        own = self._public
        q, k, v = F.silu(rows).split([own.key_dim, own.key_dim, own.value_dim], dim=-1)
        repeats: int = own.num_v_heads // own.num_k_heads

        def unit(flat: torch.Tensor) -> torch.Tensor:
            split = heads(flat, own.num_k_heads)
            normed = split / (split.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            return normed.repeat_interleave(repeats, dim=1)

        projected = self._project(own, hidden)
        steps = F.softplus(projected.step + own.dt_bias)
        return Tokens(
            q=unit(q) * own.head_k_dim**-0.5,
            k=unit(k),
            v=heads(v, own.num_v_heads),
            decay=(-own.A_log.exp() * steps).exp(),
            beta=projected.beta.sigmoid(),
        )

    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        own = self._public
        gate = self._project(own, hidden).gate
        scale = (mixed.square().mean(-1, keepdim=True) + own.layer_norm_epsilon).rsqrt()
        outputs: torch.Tensor = own.out_proj((mixed * scale * own.norm.weight * F.silu(gate)).flatten(1))
        return outputs

    def public(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._public(hidden[None])[0]
        return outputs


class _GatedAttention(ReferenceAttention):
    """Grouped attention with query and key norms and an output gate."""

    def __init__(self, public: Public, config: Public) -> None:
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


def _take_apart(public: Public) -> ReferenceFamily:
    layers = [
        PreNormLayer(
            _GatedDelta(layer.linear_attn)
            if hasattr(layer, "linear_attn")
            else _GatedAttention(layer.self_attn, public.config),
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.mlp,
        )
        for layer in public.model.layers
    ]
    return TakenApart(public, layers)
