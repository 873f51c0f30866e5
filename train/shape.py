"""The demo model's shape, its initial weights and its public config."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from train.tokenizer import VOCABULARY_SIZE

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Qwen3.5 text model; three linear layers precede each full-attention layer."""

    vocabulary: int = VOCABULARY_SIZE
    hidden: int = 384
    layers: int = 8
    key_heads: int = 4
    value_heads: int = 8
    linear_head: int = 64
    query_heads: int = 6
    kv_heads: int = 2
    head: int = 64
    inner: int = 1024
    rope_theta: float = 10000.0
    epsilon: float = 1e-6

    @property
    def rotary(self) -> int:
        """Rotated dimensions of a head: a quarter."""
        return self.head // 4

    def is_full(self, layer: int) -> bool:
        """Whether the layer has full attention."""
        return layer % 4 == 3


def new_weights(shape: ModelShape, seed: int, device: torch.device) -> Weights:
    """fp32 leaves by short name; the query, key and value rows of a projection are apart."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}

    def put(name: str, value: torch.Tensor) -> None:
        weights[name] = value.to(device).requires_grad_()

    def matrix(name: str, rows: int, columns: int, gain: float = 0.5) -> None:
        put(name, torch.randn(rows, columns, generator=generator) * gain / math.sqrt(columns))

    h, out_gain = shape.hidden, 0.5 / math.sqrt(2 * shape.layers)
    put("embed", torch.randn(shape.vocabulary, h, generator=generator) * 0.02)
    put("norm", torch.zeros(h))
    for layer in range(shape.layers):
        p = f"{layer}."
        put(p + "norm1", torch.zeros(h))
        put(p + "norm2", torch.zeros(h))
        matrix(p + "gate", shape.inner, h)
        matrix(p + "up", shape.inner, h)
        matrix(p + "down", h, shape.inner, out_gain)
        if shape.is_full(layer):
            matrix(p + "q", 2 * shape.query_heads * shape.head, h)
            matrix(p + "k", shape.kv_heads * shape.head, h)
            matrix(p + "v", shape.kv_heads * shape.head, h)
            matrix(p + "out", h, shape.query_heads * shape.head, out_gain)
            put(p + "q_norm", torch.zeros(shape.head))
            put(p + "k_norm", torch.zeros(shape.head))
            continue
        keys, values = shape.key_heads * shape.linear_head, shape.value_heads * shape.linear_head
        matrix(p + "q", keys, h)
        matrix(p + "k", keys, h)
        matrix(p + "v", values, h)
        matrix(p + "z", values, h)
        matrix(p + "b", shape.value_heads, h)
        matrix(p + "a", shape.value_heads, h)
        matrix(p + "out", h, values, out_gain)
        put(p + "conv", torch.rand(2 * keys + values, 4, generator=generator) - 0.5)
        put(p + "a_log", torch.zeros(shape.value_heads))
        put(p + "dt_bias", initial_dt_bias(shape.value_heads))
        put(p + "o_norm", torch.ones(shape.linear_head))
    return weights


def initial_dt_bias(heads: int) -> torch.Tensor:
    """Biases under which the heads' memories reach from about 3 to 3,000 tokens."""
    rates = torch.logspace(math.log10(3e-4), math.log10(0.3), heads)
    return torch.log(torch.expm1(rates))


def public_state(shape: ModelShape, weights: Weights) -> dict[str, torch.Tensor]:
    """bf16 tensors under the names of a `Qwen3_5ForCausalLM` checkpoint (tied embeddings)."""
    w = {name: value.detach().to("cpu", torch.bfloat16) for name, value in weights.items()}
    state = {"model.embed_tokens.weight": w["embed"], "model.norm.weight": w["norm"]}
    for layer in range(shape.layers):
        s, d = f"{layer}.", f"model.layers.{layer}."
        state[d + "input_layernorm.weight"] = w[s + "norm1"]
        state[d + "post_attention_layernorm.weight"] = w[s + "norm2"]
        for name in ("gate", "up", "down"):
            state[f"{d}mlp.{name}_proj.weight"] = w[s + name]
        if shape.is_full(layer):
            for name in ("q", "k", "v"):
                state[f"{d}self_attn.{name}_proj.weight"] = w[s + name]
            state[d + "self_attn.o_proj.weight"] = w[s + "out"]
            state[d + "self_attn.q_norm.weight"] = w[s + "q_norm"]
            state[d + "self_attn.k_norm.weight"] = w[s + "k_norm"]
            continue
        d += "linear_attn."
        state[d + "in_proj_qkv.weight"] = torch.cat([w[s + "q"], w[s + "k"], w[s + "v"]])
        for name in ("z", "b", "a"):
            state[f"{d}in_proj_{name}.weight"] = w[s + name]
        state[d + "conv1d.weight"] = w[s + "conv"].unsqueeze(1)
        state[d + "A_log"] = w[s + "a_log"]
        state[d + "dt_bias"] = w[s + "dt_bias"]
        state[d + "norm.weight"] = w[s + "o_norm"]
        state[d + "out_proj.weight"] = w[s + "out"]
    return {name: value.contiguous() for name, value in state.items()}


def public_config(shape: ModelShape, end_of_text: int, message_end: int) -> dict[str, Any]:
    """Contents of `config.json`."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": shape.epsilon,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "full_attention_interval": 4,
        "layer_types": ["full_attention" if shape.is_full(i) else "linear_attention" for i in range(shape.layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": shape.linear_head,
        "linear_value_head_dim": shape.linear_head,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "initializer_range": 0.02,
        "use_cache": True,
        "eos_token_id": message_end,
        "pad_token_id": end_of_text,
        "dtype": "bfloat16",
    }
