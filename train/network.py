"""Forward pass of the demo model over `[tokens]`-flat batches of equally long rows.

The functions below know nothing of the rows' length, so each compiles once for all lengths;
the scan over chunks and attention, which do, run between them.
"""

from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from train.recurrence import CHUNK, ChunkScan, unit_lower_inverse
from train.shape import ModelShape, Weights

P = ParamSpec("P")
R = TypeVar("R")


class LinearParts(NamedTuple):
    """What the chunks of a linear layer need: `[chunks, heads, 64, 64]` each, and the gate."""

    reads: Tensor
    inside: Tensor
    transition: Tensor
    end_state: Tensor
    gate: Tensor


class AttentionParts(NamedTuple):
    """Rotated queries and keys, values `[tokens, query_heads, head]`, and the gate."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor


def _rms(x: Tensor, epsilon: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return (_rms(x, epsilon) * (1 + weight)).to(x.dtype)


def _project(x: Tensor, *weights: Tensor) -> Tensor:
    return x @ torch.cat([w.to(x.dtype) for w in weights]).t()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def embed(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Token embeddings `[tokens, hidden]`."""
    return F.embedding(ids, table).to(dtype)


def _convolve(x: Tensor, position: Tensor, taps: Tensor) -> Tensor:
    out = x.float() * taps[:, 3]
    for back in (1, 2, 3):
        earlier = F.pad(x, (0, 0, back, 0))[:-back].float()
        earlier = torch.where((position >= back)[:, None], earlier, 0.0)
        out = out + earlier * taps[:, 3 - back]
    return F.silu(out)


def _heads(x: Tensor, heads: int) -> Tensor:
    """`[tokens, heads * 64]` to `[chunks, heads, 64, 64]`."""
    return x.view(-1, CHUNK, heads, CHUNK).transpose(1, 2)


def linear_before(x: Tensor, position: Tensor, w: dict[str, Tensor], shape: ModelShape) -> LinearParts:
    """Everything of a linear layer up to the scan over chunks."""
    dtype, heads, groups = x.dtype, shape.value_heads, shape.value_heads // shape.key_heads
    keys, values = shape.key_heads * shape.linear_head, heads * shape.linear_head
    mixed = _project(_norm(x, w["norm1"], shape.epsilon), w["q"], w["k"], w["v"], w["z"], w["b"], w["a"])
    qkv, z, b, a = mixed.split([2 * keys + values, values, heads, heads], -1)
    q, k, v = _convolve(qkv, position, w["conv"]).split([keys, keys, values], -1)
    q = _unit(_heads(q, shape.key_heads)) * shape.linear_head**-0.5
    k = _unit(_heads(k, shape.key_heads))
    v = _heads(v, heads)
    beta = b.float().sigmoid().view(-1, CHUNK, heads).transpose(1, 2).unsqueeze(-1)
    log_a = -w["a_log"].exp() * F.softplus(a.float() + w["dt_bias"])
    decay = log_a.view(-1, CHUNK, heads).transpose(1, 2).cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
    ratio = decay.unsqueeze(-1) - decay.unsqueeze(-2)
    ratio = torch.where(lower, ratio, float("-inf")).exp()
    kk = (k @ k.transpose(-1, -2)).repeat_interleave(groups, 1)
    inverse = unit_lower_inverse((beta * ratio * kk).tril(-1)).to(dtype)
    qk = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)).repeat_interleave(groups, 1)
    inner = (ratio * qk).to(dtype)
    q, k = q.repeat_interleave(groups, 1), k.repeat_interleave(groups, 1)
    rise = decay.exp().unsqueeze(-1)
    u_w = inverse @ torch.cat([beta * v, beta * rise * k], -1).to(dtype)
    inside, inner_w = (inner @ u_w).split(CHUNK, -1)
    fall = (decay[..., -1:] - decay).exp().unsqueeze(-1)
    end_state, taken = ((fall * k).to(dtype).transpose(-1, -2) @ u_w).float().split(CHUNK, -1)
    eye = torch.eye(CHUNK, device=x.device)
    transition = rise[..., -1:, :] * eye - taken
    reads = (rise * q - inner_w).to(dtype)
    return LinearParts(reads, inside, transition, end_state, z)


def linear_after(x: Tensor, parts: LinearParts, states: Tensor, w: dict[str, Tensor], shape: ModelShape) -> Tensor:
    """Reads the states, then output projection and feed-forward."""
    out = parts.reads @ states.to(x.dtype) + parts.inside
    out = out.transpose(1, 2).reshape(-1, shape.value_heads, shape.linear_head)
    gate = F.silu(parts.gate.float()).view_as(out)
    out = (_rms(out, shape.epsilon) * w["o_norm"] * gate).to(x.dtype)
    return _feed_forward(x + _project(out.flatten(1), w["out"]), w, shape)


def _feed_forward(x: Tensor, w: dict[str, Tensor], shape: ModelShape) -> Tensor:
    both = _project(_norm(x, w["norm2"], shape.epsilon), w["gate"], w["up"])
    gate, up = both.chunk(2, -1)
    return x + _project(F.silu(gate) * up, w["down"])


def _rotate(x: Tensor, position: Tensor, shape: ModelShape) -> Tensor:
    half = shape.rotary // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = position[:, None].float() * shape.rope_theta**-steps
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attention_before(x: Tensor, position: Tensor, w: dict[str, Tensor], shape: ModelShape) -> AttentionParts:
    """Everything of a full-attention layer up to the attention itself."""
    heads, kv, size = shape.query_heads, shape.kv_heads * shape.head, shape.head
    mixed = _project(_norm(x, w["norm1"], shape.epsilon), w["q"], w["k"], w["v"])
    q_gate, k, v = mixed.split([2 * heads * size, kv, kv], -1)
    q, gate = q_gate.view(-1, heads, 2 * size).chunk(2, -1)
    q = _rms(q, shape.epsilon) * (1 + w["q_norm"])
    k = _rms(k.view(-1, shape.kv_heads, size), shape.epsilon) * (1 + w["k_norm"])
    groups = heads // shape.kv_heads
    return AttentionParts(
        _rotate(q, position, shape).to(x.dtype),
        _rotate(k, position, shape).to(x.dtype).repeat_interleave(groups, 1),
        v.view(-1, shape.kv_heads, size).repeat_interleave(groups, 1),
        gate.reshape(-1, heads * size),
    )


def attention_after(x: Tensor, out: Tensor, gate: Tensor, w: dict[str, Tensor], shape: ModelShape) -> Tensor:
    """Gates the attention's result `[tokens, heads * head]`, projects it, feeds forward."""
    gated = (out * gate.float().sigmoid()).to(x.dtype)
    return _feed_forward(x + _project(gated, w["out"]), w, shape)


def token_losses(x: Tensor, targets: Tensor, norm: Tensor, table: Tensor, shape: ModelShape) -> Tensor:
    """Cross-entropy of each token's next token, `[tokens]`, fp32."""
    logits = _norm(x, norm, shape.epsilon) @ table.to(x.dtype).t()
    return F.cross_entropy(logits.float(), targets, reduction="none")


class Network:
    """The model; `compiled` turns its functions into fused kernels."""

    def __init__(self, shape: ModelShape, weights: Weights, dtype: torch.dtype, *, compiled: bool) -> None:
        def prepare(function: Callable[P, R]) -> Callable[P, R]:
            return torch.compile(function, fullgraph=True, dynamic=False) if compiled else function

        self.shape = shape
        self.weights = weights
        self._dtype = dtype
        self._layers = [
            {n.removeprefix(f"{i}."): p for n, p in weights.items() if n.startswith(f"{i}.")}
            for i in range(shape.layers)
        ]
        self._embed = prepare(embed)
        self._linear_before = prepare(linear_before)
        self._linear_after = prepare(linear_after)
        self._attention_before = prepare(attention_before)
        self._attention_after = prepare(attention_after)
        self._token_losses = prepare(token_losses)

    def hidden(self, ids: Tensor, position: Tensor, rows: int, *, keep: bool = True) -> Tensor:
        """Residual stream `[tokens, hidden]`; `keep=False` drops what a backward would need."""
        x = self._embed(ids, self.weights["embed"], self._dtype)
        for layer, w in enumerate(self._layers):
            run = self._attend if self.shape.is_full(layer) else self._recur
            x = run(x, position, rows, w)
            x = x if keep else x.detach().requires_grad_()
        return x

    def losses(self, ids: Tensor, targets: Tensor, position: Tensor, rows: int) -> Tensor:
        """Loss of every token, `[tokens]`."""
        x = self.hidden(ids, position, rows)
        weights = self.weights
        return self._token_losses(x, targets, weights["norm"], weights["embed"], self.shape)

    def best_next(self, x: Tensor) -> Tensor:
        """The likeliest next token after each row of the residual stream `x`."""
        x = _norm(x, self.weights["norm"], self.shape.epsilon)
        return (x @ self.weights["embed"].to(x.dtype).t()).argmax(-1)

    def _recur(self, x: Tensor, position: Tensor, rows: int, w: dict[str, Tensor]) -> Tensor:
        parts = self._linear_before(x, position, w, self.shape)
        states = ChunkScan.apply(parts.transition, parts.end_state, rows)  # type: ignore[no-untyped-call]  # untyped in torch
        return self._linear_after(x, parts, states, w, self.shape)

    def _attend(self, x: Tensor, position: Tensor, rows: int, w: dict[str, Tensor]) -> Tensor:
        parts = self._attention_before(x, position, w, self.shape)
        q, k, v = (t.view(rows, -1, self.shape.query_heads, self.shape.head).transpose(1, 2) for t in parts[:3])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(x.shape[0], -1)
        return self._attention_after(x, out, parts.gate, w, self.shape)
