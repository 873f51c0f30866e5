"""Llama and Qwen3, dense: every layer is full attention."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.exactness.reference import rotate
from tests.exactness.reference_model import Projections, ReferenceAttention, ReferenceFamily
from tests.families.parts import PreNormLayer, TakenApart, heads
from tests.families.variant import VOCAB_SIZE, Variant, randomise, transformers_library

__all__ = ["VARIANTS"]

_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _build_llama(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 # transformers ships no types
    transformers = transformers_library()
    return _prepared(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_BASE, **config})))


def _build_qwen3(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 # transformers ships no types
    transformers = transformers_library()
    return _prepared(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**_BASE, **config})))


def _prepared(model: Any) -> Any:  # noqa: ANN401 # transformers ships no types
    model.eval()
    randomise(model)
    return model


class _Attention(ReferenceAttention):
    """Grouped attention; queries and keys are normed where the public module has norms."""

    def __init__(self, public: Any, config: Any) -> None:  # noqa: ANN401 # transformers ships no types
        self._public = public
        self._config = config
        self.scale = config.head_dim**-0.5

    def project(self, hidden: torch.Tensor) -> Projections:
        own, config = self._public, self._config
        queries = heads(own.q_proj(hidden), config.num_attention_heads)
        keys = heads(own.k_proj(hidden), config.num_key_value_heads)
        values = heads(own.v_proj(hidden), config.num_key_value_heads)
        return Projections(self._norm("q_norm")(queries), self._norm("k_norm")(keys), values)

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rope, dim = self._config.rope_parameters, self._config.head_dim
        if rope["rope_type"] == "default":
            return rotate(heads, positions, rope["rope_theta"], dim)
        turned = heads.clone()
        for channel in range(dim // 2):
            pair = [channel, channel + dim // 2]
            turned[..., pair] = _turn(heads[..., pair], positions * _llama3(rope, channel, dim))
        return turned

    def outputs(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._public.o_proj(mixed.flatten(1))
        return outputs

    def _norm(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return getattr(self._public, name, lambda heads: heads)


def _llama3(rope: Mapping[str, float], channel: int, dim: int) -> float:
    """One channel's angle a token under the `llama3` scaling, by its wavelength's place between the two limits."""
    angle = float(rope["rope_theta"] ** (-2 * channel / dim))
    wavelength, trained = 2 * math.pi / angle, rope["original_max_position_embeddings"]
    shortest, longest = trained / rope["high_freq_factor"], trained / rope["low_freq_factor"]
    if wavelength < shortest:
        return angle
    if wavelength > longest:
        return angle / rope["factor"]
    mixed = (trained / wavelength - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    return (1 - mixed) * angle / rope["factor"] + mixed * angle


def _turn(pairs: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Pairs `[N, H, 2]` turned by angles `[N]`."""
    cos, sin = angles.double().cos(), angles.double().sin()
    matrix = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    return torch.einsum("nij,nhj->nhi", matrix, pairs)


def _take_apart(public: Any) -> ReferenceFamily:  # noqa: ANN401 # transformers ships no types
    layers = [
        PreNormLayer(
            _Attention(layer.self_attn, public.config),
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.mlp,
        )
        for layer in public.model.layers
    ]
    return TakenApart(public, layers)


_TIED = {"num_hidden_layers": 3, "tie_word_embeddings": True}
# Of 8 channel pairs, each kind: kept, on the ramp, slowed down.
_SCALED = {
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "tie_word_embeddings": False,
}
_QWEN3 = {"num_hidden_layers": 3, "head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": False}

VARIANTS = (
    Variant("llama-tied", _build_llama, _take_apart, _TIED),
    Variant("llama-scaled", _build_llama, _take_apart, _SCALED),
    Variant("qwen3-dense", _build_qwen3, _take_apart, _QWEN3),
)
