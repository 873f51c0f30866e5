"""Ring-linear-2.0 and Ring-2.5 as torch modules under the released names, token by token.

transformers has neither, so this stands in for the public implementation. It is written from the published descriptions:
"Every Attention Matters" (arXiv 2510.19338) and the publisher's page of the modelling file (github.com/inclusionAI/Ring-V2.5).
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from tests.families.parts import heads

__all__ = ["GroupedAttention", "LatentAttention", "Lightning", "Ring"]


def _turn(unturned: torch.Tensor, theta: float, rotary_dim: int, interleaved: bool) -> torch.Tensor:
    """Heads `[N, H, D]` at positions 0 to N − 1, turned pair by pair in their first channels."""
    turned = unturned.clone()
    places = torch.arange(unturned.shape[0], dtype=unturned.dtype)[:, None]
    for pair in range(rotary_dim // 2):
        one, two = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary_dim // 2)
        cos, sin = (
            (places * theta ** (-2 * pair / rotary_dim)).cos(),
            (places * theta ** (-2 * pair / rotary_dim)).sin(),
        )
        turned[..., one] = unturned[..., one] * cos - unturned[..., two] * sin
        turned[..., two] = unturned[..., two] * cos + unturned[..., one] * sin
    return turned


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of `[N, H, D]` over as many keys and values, to `[N, H · Dv]`."""
    scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)


def _slopes(count: int) -> list[float]:
    nearest = 2 ** math.floor(math.log2(count))
    start = 2.0 ** -(2.0 ** (3 - math.log2(nearest)))
    own = [start ** (head + 1) for head in range(nearest)]
    return own if nearest == count else own + _slopes(2 * nearest)[0::2][: count - nearest]


class _Norm(nn.Module):
    """RMS norm over equal groups of channels, one by default."""

    def __init__(self, size: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups, self.eps = groups, eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        runs: torch.Tensor = hidden.unflatten(-1, (self.groups, -1))
        return (runs / (runs.square().mean(-1, keepdim=True) + self.eps).sqrt()).flatten(-2) * self.weight


class _Heads(nn.Module):
    """Queries, keys and values of one projection, with norms over a head's channels."""

    def __init__(self, config: Any, num_kv_heads: int) -> None:  # noqa: ANN401 # a config's fields
        super().__init__()
        self.config, self.num_kv_heads = config, num_kv_heads
        queries, dim = config.num_attention_heads, config.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, (queries + 2 * num_kv_heads) * dim, bias=False)
        self.query_layernorm = _Norm(dim, config.rms_norm_eps)
        self.key_layernorm = _Norm(dim, config.rms_norm_eps)
        self.dense = nn.Linear(queries * dim, config.hidden_size, bias=False)
        self.rotary_dim = int(dim * config.partial_rotary_factor)

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normed queries and keys, and values, `[N, heads, D]`, without position."""
        counts = [self.config.num_attention_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = heads(self.query_key_value(hidden), sum(counts)).split(counts, dim=1)
        return self.query_layernorm(q), self.key_layernorm(k), v

    def turn(self, unturned: torch.Tensor) -> torch.Tensor:
        return _turn(unturned, self.config.rope_theta, self.rotary_dim, interleaved=False)


class Lightning(_Heads):
    """`S ← e^(−slope) S + k vᵀ`, `o = Sᵀ q / √D`, group norm, sigmoid gate."""

    slopes: torch.Tensor

    def __init__(self, config: Any, layer: int) -> None:  # noqa: ANN401 # a config's fields
        super().__init__(config, config.num_attention_heads)
        width = config.num_attention_heads * config.head_dim
        self.g_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.g_norm = _Norm(width, config.rms_norm_eps, config.group_norm_size)
        depth = (layer - config.hypic_slope_layer_offset) / (config.num_hidden_layers - 1)
        slopes = torch.tensor(_slopes(config.num_attention_heads), dtype=torch.float64) * (1 - depth + 1e-5)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(hidden)
        q, k = self.turn(q) * self.config.head_dim**-0.5, self.turn(k)
        decay = (-self.slopes).exp().to(hidden.dtype)[:, None, None]
        state, outputs = torch.zeros_like(k[0][:, :, None] * v[0][:, None]), []
        for token in range(len(hidden)):
            state = decay * state + k[token][:, :, None] * v[token][:, None]
            outputs.append((q[token][:, :, None] * state).sum(1))
        return self.finish(torch.stack(outputs), hidden)

    def finish(self, mixed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs `[N, H, D]` behind norm, gate and projection."""
        outputs: torch.Tensor = self.dense(self.g_norm(mixed.flatten(1)) * self.g_proj(hidden).sigmoid())
        return outputs


class GroupedAttention(_Heads):
    """Softmax attention with fewer keys than queries."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 # a config's fields
        super().__init__(config, config.num_key_value_heads)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(hidden)
        repeats = q.shape[1] // k.shape[1]
        k, v = self.turn(k).repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        outputs: torch.Tensor = self.dense(_attend(self.turn(q), k, v))
        return outputs


class LatentAttention(nn.Module):
    """Multi-head latent attention, keys and values expanded; interleaved position. Its norms have an epsilon of 1e-6."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 # a config's fields
        super().__init__()
        self.config = config
        count, hidden, rank = config.num_attention_heads, config.hidden_size, config.q_lora_rank
        self.query_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        if rank is None:
            self.q_proj = nn.Linear(hidden, count * self.query_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, rank, bias=False)
            self.q_a_layernorm = _Norm(rank, 1e-6)
            self.q_b_proj = nn.Linear(rank, count * self.query_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = _Norm(config.kv_lora_rank, 1e-6)
        expanded = count * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, expanded, bias=False)
        self.dense = nn.Linear(count * config.v_head_dim, hidden, bias=False)

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys with the positional channels first, not yet turned, and values, of every head."""
        config = self.config
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        projected = self.q_proj(hidden) if config.q_lora_rank is None else self._low_rank(hidden)
        q = heads(projected, config.num_attention_heads)
        latent, positional = self.kv_a_proj_with_mqa(hidden).split([rank, rope], dim=-1)
        expanded = heads(self.kv_b_proj(self.kv_a_layernorm(latent)), config.num_attention_heads)
        k, v = expanded.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        k = torch.cat([positional[:, None].expand(-1, config.num_attention_heads, -1), k], dim=-1)
        return q.roll(rope, -1), k, v

    def _low_rank(self, hidden: torch.Tensor) -> torch.Tensor:
        queries: torch.Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        return queries

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(hidden)
        theta, rope = self.config.rope_theta, self.config.qk_rope_head_dim
        outputs: torch.Tensor = self.dense(_attend(_turn(q, theta, rope, True), _turn(k, theta, rope, True), v))
        return outputs


class _Mlp(nn.Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, size, bias=False)
        self.up_proj = nn.Linear(hidden, size, bias=False)
        self.down_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return outputs


class _Gate(nn.Module):
    """Chooses experts by sigmoid score plus bias, from the best groups; weighs them by their scores."""

    expert_bias: torch.Tensor

    def __init__(self, config: Any) -> None:  # noqa: ANN401 # a config's fields
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias = torch.linspace(-0.2, 0.2, config.num_experts).roll(config.num_experts // 3)
        self.register_buffer("expert_bias", bias)

    def forward(self, token: torch.Tensor) -> dict[int, torch.Tensor]:
        """The chosen experts of one token `[hidden]` with their weights."""
        config = self.config
        scores = F.linear(token, self.weight).sigmoid()
        biased = (scores + self.expert_bias).tolist()
        size = config.num_experts // config.n_group
        groups = [range(start, start + size) for start in range(0, config.num_experts, size)]
        groups.sort(key=lambda group: sum(sorted((biased[each] for each in group), reverse=True)[:2]), reverse=True)
        candidates = [expert for group in groups[: config.topk_group] for expert in group]
        chosen = sorted(candidates, key=lambda expert: biased[expert], reverse=True)[: config.num_experts_per_tok]
        total = scores[chosen].sum() if len(chosen) > 1 else 1.0
        return {expert: scores[expert] / total * config.routed_scaling_factor for expert in chosen}


class _Experts(nn.Module):
    def __init__(self, config: Any) -> None:  # noqa: ANN401 # a config's fields
        super().__init__()
        size = config.moe_intermediate_size
        self.experts = nn.ModuleList(_Mlp(config.hidden_size, size) for _ in range(config.num_experts))
        self.gate = _Gate(config)
        self.shared_experts = _Mlp(config.hidden_size, size * config.num_shared_experts)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        routed = [
            torch.stack([weight * self.experts[expert](token) for expert, weight in self.gate(token).items()]).sum(0)
            for token in hidden.flatten(0, -2)
        ]
        outputs: torch.Tensor = torch.stack(routed).view_as(hidden) + self.shared_experts(hidden)
        return outputs


class _Layer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:  # noqa: ANN401 # a config's fields
        super().__init__()
        group = config.layer_group_size
        full = (layer + 1) % group == 0 or layer >= config.num_hidden_layers // group * group
        attention = LatentAttention if config.model_type == "bailing_hybrid" else GroupedAttention
        self.attention = attention(config) if full else Lightning(config, layer)
        dense = layer < config.first_k_dense_replace
        self.mlp = _Mlp(config.hidden_size, config.intermediate_size) if dense else _Experts(config)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.input_layernorm(hidden))
        outputs: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return outputs


class _Decoder(nn.Module):
    def __init__(self, config: Any) -> None:  # noqa: ANN401 # a config's fields
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)

    @property
    def embed_tokens(self) -> nn.Module:
        """The embedding, under the name that most families give it."""
        return self.word_embeddings


class Ring(nn.Module):
    """A model of a config's fields; the head is tied where the config says so."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.model = _Decoder(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.word_embeddings.weight

    def forward(self, token_ids: torch.Tensor) -> SimpleNamespace:
        """Logits `[1, N, vocabulary]` of one prompt `[1, N]`."""
        hidden = self.model.word_embeddings(token_ids[0])
        for layer in self.model.layers:
            hidden = layer(hidden)
        return SimpleNamespace(logits=self.lm_head(self.model.norm(hidden))[None])

    def generate(self, token_ids: torch.Tensor, *, max_new_tokens: int, **options: Any) -> torch.Tensor:  # noqa: ANN401
        """The prompt with greedily chosen tokens behind it, each from the whole text before it."""
        assert options.pop("do_sample") is False
        for _ in range(max_new_tokens):
            best = self(token_ids).logits[:, -1:].argmax(-1)
            token_ids = torch.cat([token_ids, best], dim=1)
        return token_ids

    def save_pretrained(self, directory: Path) -> None:
        """A checkpoint directory as the publisher lays it out."""
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(vars(self.config)))
        tensors = dict(self.state_dict())
        if self.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        save_file(tensors, directory / "model.safetensors")
