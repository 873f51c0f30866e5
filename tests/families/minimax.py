"""MiniMax-M1 and MiniMax-Text-01."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.exactness.reference import Tokens, rotate
from tests.exactness.reference_model import Projections, ReferenceAttention, ReferenceFamily, ReferenceLinear
from tests.families.parts import TakenApart, heads
from tests.families.variant import VOCAB_SIZE, Variant, randomise, transformers_library

__all__ = ["VARIANTS", "take_apart"]


def _build(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 # transformers ships no types
    base = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 24,
        "head_dim": 16,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": None,
        "eos_token_id": None,
    }
    transformers = transformers_library()
    model = transformers.MiniMaxForCausalLM(transformers.MiniMaxConfig(**base, **config)).eval()
    randomise(model)
    for module in model.modules():
        if hasattr(module, "slope_rate"):
            # Released checkpoints hold no decays.
            module._non_persistent_buffers_set.update(("slope_rate", "query_decay", "key_decay", "diagonal_decay"))
    return model


class LightningReference(ReferenceLinear):
    """A lightning layer without position; rows are `[q | k | v]` head by head."""

    def __init__(self, public: Any) -> None:  # noqa: ANN401 # transformers ships no types
        self._public = public

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._public.qkv_proj(hidden)
        return rows

    def tokens(self, rows: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> Tokens:
        own = self._public
        q, k, v = heads(F.silu(rows), own.num_attention_heads).chunk(3, dim=-1)
        return Tokens(q, k, v, (-own.slope_rate[:, 0, 0]).exp().expand(len(rows), -1), None)

    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        own = self._public
        flat = mixed.flatten(1)
        normed = flat * (flat.square().mean(-1, keepdim=True) + own.norm.variance_epsilon).rsqrt() * own.norm.weight
        outputs: torch.Tensor = own.out_proj(own.output_gate(hidden).sigmoid() * normed)
        return outputs

    def public(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._public(hidden[None], None, None)[0][0]
        return outputs


class GroupedReference(ReferenceAttention):
    """Grouped attention that turns whole heads, or the first `rotary_dim` channels of each."""

    def __init__(self, public: Any, rotary_dim: int | None) -> None:  # noqa: ANN401 # transformers ships no types
        self._public = public
        self._rotary_dim = rotary_dim or public.head_dim
        self.scale = public.head_dim**-0.5

    def project(self, hidden: torch.Tensor) -> Projections:
        own, config = self._public, self._public.config
        queries = heads(own.q_proj(hidden), config.num_attention_heads)
        keys, values = (heads(each(hidden), config.num_key_value_heads) for each in (own.k_proj, own.v_proj))
        return Projections(queries, keys, values)

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        theta = float(self._public.config.rope_parameters["rope_theta"])
        return rotate(heads, positions, theta, self._rotary_dim)

    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._public.o_proj(mixed.flatten(1))
        return outputs


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """The residual behind the norm, of a public layer."""

    mixer: ReferenceLinear | ReferenceAttention
    public: Any

    def run(self, hidden: torch.Tensor, mix: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        own = self.public
        hidden = own.input_layernorm(hidden)
        hidden = own.attn_alpha_factor * hidden + own.attn_beta_factor * mix(hidden)
        hidden = own.post_attention_layernorm(hidden)
        outputs: torch.Tensor = own.mlp_alpha_factor * hidden + own.mlp_beta_factor * own.mlp(hidden[None])[0]
        return outputs


def take_apart(public: Any, rotary_dim: int | None = None) -> ReferenceFamily:  # noqa: ANN401 # transformers ships no types
    """The public model as its parts; it knows no `rotary_dim` itself."""
    layers = [
        PostNormLayer(
            LightningReference(layer.self_attn)
            if hasattr(layer.self_attn, "slope_rate")
            else GroupedReference(layer.self_attn, rotary_dim),
            layer,
        )
        for layer in public.model.layers
    ]
    return TakenApart(public, layers)


_STANDARD = {
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_attn_alpha_factor": 1.5,
    "linear_attn_beta_factor": 0.9,
    "full_attn_alpha_factor": 1.25,
    "full_attn_beta_factor": 1.1,
    "mlp_alpha_factor": 1.2,
    "mlp_beta_factor": 0.8,
    "tie_word_embeddings": False,
}
# A last layer that is linear would forget nothing, by a factor of 1e-5 or, in transformers, 1.5e-5.
_ATTENTION_FIRST = {
    **_STANDARD,
    "num_key_value_heads": 1,
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
    "tie_word_embeddings": True,
}

VARIANTS = (
    Variant("minimax-standard", _build, take_apart, _STANDARD),
    Variant("minimax-attention-first", _build, take_apart, _ATTENTION_FIRST),
)
