"""Tiny checkpoints, written by transformers, whose gates remember.

With default random weights the gates forget everything within a few tokens, and a wrong transition passes every test.
Here each head keeps between 5 and 95 % over bodies of 16 to 200 tokens; `tests.exactness.rig` asserts it.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["VARIANTS", "CheckpointFactory", "Variant", "reference_logits"]

# Decay a token of the slowest and the fastest head: e^(−0.0035·16) = 0.95, e^(−0.0145·200) = 0.055.
_SLOWEST, _FASTEST = 0.0035, 0.0145
VOCAB_SIZE = 211


@dataclass(frozen=True, slots=True)
class Variant:
    """One tiny shape of one family."""

    name: str
    build: Callable[[Mapping[str, Any]], Any]
    config: Mapping[str, Any] = field(hash=False)


def _transformers() -> Any:  # noqa: ANN401 # transformers ships no types
    """Imported on first use: it takes seconds, and most tests need no model."""
    with warnings.catch_warnings():
        # transformers probes optional packages whose imports warn; none of them is used here.
        warnings.simplefilter("ignore")
        import transformers
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _build_qwen3_5(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 # transformers ships no types
    base = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    }
    transformers = _transformers()
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**base, **config)).eval()
    _randomise(model)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            _remember(layer.linear_attn)
    return model


@torch.no_grad()
def _randomise(model: Any) -> None:  # noqa: ANN401 # transformers ships no types
    """Weights large enough that every layer matters, and norm weights that differ from their default."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.add_(0.2 * noise)
        elif parameter.ndim >= 2:
            parameter.copy_(noise * (0.25 if "embed" in name else parameter[0].numel() ** -0.5))


@torch.no_grad()
def _remember(mixer: Any) -> None:  # noqa: ANN401 # transformers ships no types
    """Slow gates of a gated delta layer: `softplus(a + dt_bias)` near 1, a head's rate between the two bounds."""
    heads = mixer.A_log.shape[0]
    rates = torch.linspace(_SLOWEST * 1.15, _FASTEST * 0.85, heads)
    mixer.A_log.copy_(rates.log())
    mixer.dt_bias.copy_(torch.full((heads,), 0.5413))
    mixer.in_proj_a.weight.mul_(0.1)


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
    Variant("qwen3_5-standard", _build_qwen3_5, _STANDARD),
    Variant("qwen3_5-attention-first", _build_qwen3_5, _ATTENTION_FIRST),
    Variant("qwen3_5-wide-groups", _build_qwen3_5, _WIDE_GROUPS),
)


class CheckpointFactory:
    """Builds a variant's public model and checkpoint directory on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, Any] = {}

    def model(self, variant: Variant) -> Any:  # noqa: ANN401 # transformers ships no types
        """The public implementation, in fp32 on the CPU."""
        if variant.name not in self._models:
            model = variant.build(variant.config)
            model.save_pretrained(self._root / variant.name)
            self._models[variant.name] = model
        return self._models[variant.name]

    def directory(self, variant: Variant) -> Path:
        """The checkpoint directory as transformers wrote it."""
        self.model(variant)
        return self._root / variant.name


@torch.inference_mode()
def reference_logits(model: Any, token_ids: tuple[int, ...]) -> torch.Tensor:  # noqa: ANN401 # transformers ships no types
    """The public implementation's logits `[N, vocabulary]` of a whole prompt."""
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits.float()
