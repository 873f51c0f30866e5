"""A Llama in one GGUF file as a Hugging Face checkpoint directory: weights, config, tokenizer, chat template.

GGUF stores the rows of query and key projections for interleaved rotary pairs; here they return to the half-split order.
Quantised tensors are expanded and rounded to bf16.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["GgufError", "convert_gguf"]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# How a text is cut ahead of byte-pair merging, by the name that the file gives it.
_ISOLATES_DIGITS = {"gpt-2": False, "smollm": True}
_CONTROL_TOKEN = 3


class GgufError(Exception):
    """The file holds no model that can be converted; the message names the field."""


def convert_gguf(path: Path, directory: Path) -> None:
    """Write `config.json`, `generation_config.json`, `model.safetensors` and the tokenizer's files into `directory`.

    Raises:
        GgufError: the file's architecture, tokenizer or a tensor is not supported.
    """
    source = _Source(path)
    config = _config(source)
    directory.mkdir(parents=True, exist_ok=True)
    _tokenizer(source).save(str(directory / "tokenizer.json"))
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"do_sample": False, "eos_token_id": config["eos_token_id"]})
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(source))
    save_file(_weights(source, config), directory / "model.safetensors", {"format": "pt"})


class _Source:
    """Fields and tensors of an open file."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self._path = path

    @property
    def tensors(self) -> list[ReaderTensor]:
        return list(self._reader.tensors)

    def has(self, name: str) -> bool:
        return self._reader.get_field(name) is not None

    def read(self, name: str) -> Any:  # noqa: ANN401 # a field of any type
        field = self._reader.get_field(name)
        if field is None:
            raise self.error(f"{name} is missing")
        value = field.contents()
        return [item.item() if isinstance(item, np.generic) else item for item in value] if _is_list(field) else value

    def choice(self, name: str, supported: list[str]) -> str:
        value = str(self.read(name))
        if value not in supported:
            raise self.error(f"{name} is {value!r}, which is not supported; {' or '.join(supported)} is")
        return value

    def error(self, fault: str) -> GgufError:
        return GgufError(f"{self._path}: {fault}")


def _is_list(field: Any) -> bool:  # noqa: ANN401 # gguf's own field class is not exported
    return bool(field.types[0] == GGUFValueType.ARRAY)


def _config(source: _Source) -> dict[str, Any]:
    family = source.choice("general.architecture", ["llama"])
    if source.has("llama.rope.scaling.type"):
        raise source.error("llama.rope.scaling.type: scaled rotary position is not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": family,
        "hidden_size": source.read("llama.embedding_length"),
        "intermediate_size": source.read("llama.feed_forward_length"),
        "num_hidden_layers": source.read("llama.block_count"),
        "num_attention_heads": source.read("llama.attention.head_count"),
        "num_key_value_heads": source.read("llama.attention.head_count_kv"),
        "max_position_embeddings": source.read("llama.context_length"),
        "rms_norm_eps": source.read("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": source.read("llama.rope.freq_base")},
        "vocab_size": len(source.read("tokenizer.ggml.tokens")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in source.tensors),
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bos_token_id": source.read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.read("tokenizer.ggml.eos_token_id"),
    }


def _weights(source: _Source, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in source.tensors:
        *block, kind, _ = tensor.name.split(".")
        names = _LAYER_NAMES if block else _MODEL_NAMES
        if kind not in names or not tensor.name.endswith(".weight"):
            raise source.error(f"tensor {tensor.name} is not known")
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if kind in heads:
            values = _half_split(values, heads[kind])
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{names[kind]}.weight"] = values.to(torch.bfloat16).contiguous()
    return weights


def _half_split(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows `[heads · D, hidden]` whose neighbours turn together, as rows of which `i` and `i + D / 2` do."""
    turned: torch.Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return turned


def _tokenizer(source: _Source) -> Tokenizer:
    source.choice("tokenizer.ggml.model", ["gpt2"])
    isolates = _ISOLATES_DIGITS[source.choice("tokenizer.ggml.pre", list(_ISOLATES_DIGITS))]
    tokens: list[str] = source.read("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in source.read("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)] if isolates else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = source.read("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(source: _Source) -> dict[str, Any]:
    tokens = source.read("tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": source.read("tokenizer.chat_template"),
        "bos_token": tokens[source.read("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[source.read("tokenizer.ggml.eos_token_id")],
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.read("llama.context_length"),
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
