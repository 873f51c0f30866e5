"""Tiny random checkpoints whose replies never end by themselves."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

__all__ = ["CONTEXT_LENGTH", "write_attention_checkpoint", "write_random_checkpoint"]

CONTEXT_LENGTH = 8192
_FILES = ("tokenizer.json", "tokenizer_config.json", "profile.toml")
_MEMORY_WEIGHT = 4.0
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": False,
}
_HYBRID: dict[str, Any] = {
    **_SHAPE,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}


def write_random_checkpoint(directory: Path, tokenizer_from: Path, num_layers: int = 4) -> None:
    """A hybrid model behind a real tokenizer and template; every fourth layer, the third first, is an attention layer."""
    # Imported here: it takes seconds.
    import transformers

    kinds = (_HYBRID["layer_types"] * num_layers)[:num_layers]
    shape = _HYBRID | {"num_hidden_layers": num_layers, "layer_types": kinds}
    config = transformers.Qwen3_5TextConfig(vocab_size=_vocab_size(tokenizer_from), **shape)
    _write(transformers.Qwen3_5ForCausalLM(config), directory, tokenizer_from)


def write_attention_checkpoint(directory: Path, tokenizer_from: Path) -> None:
    """A model without linear layers behind a real tokenizer and template."""
    import transformers

    config = transformers.LlamaConfig(vocab_size=_vocab_size(tokenizer_from), **_SHAPE)
    _write(transformers.LlamaForCausalLM(config), directory, tokenizer_from)


def _special_ids(tokenizer_from: Path) -> list[int]:
    return [token["id"] for token in _read_tokenizer(tokenizer_from)["added_tokens"]]


def _vocab_size(tokenizer_from: Path) -> int:
    ordinary: dict[str, int] = _read_tokenizer(tokenizer_from)["model"]["vocab"]
    return 1 + max(*_special_ids(tokenizer_from), *ordinary.values())


def _read_tokenizer(tokenizer_from: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tokenizer_from / "tokenizer.json").read_text())
    return content


@torch.no_grad()
def _write(model: Any, directory: Path, tokenizer_from: Path) -> None:  # noqa: ANN401 # transformers ships no types
    """Random weights; rows of special tokens in the output layer are zero.

    Among thousands of random logits they never win, so that a greedy reply runs to its `max_tokens`, and a test may
    count on a stream that is still running.
    """
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.add_(0.2 * noise)
        elif parameter.ndim >= 2:
            parameter.copy_(noise * (1.0 if "embed" in name else parameter[0].numel() ** -0.5))
        if name.endswith(("o_proj.weight", "out_proj.weight")):
            # What stands before a token weighs more than the token, so that a wrong state changes the reply.
            parameter.mul_(_MEMORY_WEIGHT)
        if name.endswith("A_log"):
            # Slow gates: documents are remembered until the answer.
            parameter.copy_(torch.linspace(0.004, 0.012, parameter.numel()).log())
    model.lm_head.weight[_special_ids(tokenizer_from)] = 0.0
    model.save_pretrained(directory)
    for name in _FILES:
        shutil.copy(tokenizer_from / name, directory / name)
