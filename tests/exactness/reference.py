"""Token-by-token references in fp64, written from the formulas of design §3 and independent of `services.worker.ops`."""

from dataclasses import dataclass
from enum import StrEnum

import torch

__all__ = ["Maps", "Rule", "Tokens", "attend", "body_maps", "convolve", "draw_tokens", "rotate", "run_tokens"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What tokens bring to a linear layer, all fp64: q, k `[N, H, K]`; v `[N, H, V]`; decay `[N, H]` or `[N, H, K]`.

    beta: `[N, H]` of a delta rule, None where nothing is erased.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None

    def __getitem__(self, rows: slice) -> "Tokens":
        beta = None if self.beta is None else self.beta[rows]
        return Tokens(self.q[rows], self.k[rows], self.v[rows], self.decay[rows], beta)

    def __len__(self) -> int:
        return self.v.shape[0]

    @property
    def written(self) -> torch.Tensor:
        """`[N, H]`: the factor on a token's write."""
        return torch.ones_like(self.v[..., 0]) if self.beta is None else self.beta

    @staticmethod
    def concatenate(pieces: "list[Tokens]") -> "Tokens":
        """Runs one behind the other."""
        betas = [piece.beta for piece in pieces if piece.beta is not None]
        return Tokens(
            torch.cat([piece.q for piece in pieces]),
            torch.cat([piece.k for piece in pieces]),
            torch.cat([piece.v for piece in pieces]),
            torch.cat([piece.decay for piece in pieces]),
            torch.cat(betas) if betas else None,
        )


@dataclass(frozen=True, slots=True)
class Maps:
    """What a run does to a state: `state_out = transition @ state_in + end_state`."""

    transition: torch.Tensor
    end_state: torch.Tensor


@dataclass(frozen=True, slots=True)
class Ran:
    """outputs `[N, H, V]`; state `[H, K, V]`."""

    outputs: torch.Tensor
    state: torch.Tensor


def token_transition(tokens: Tokens, token: int) -> torch.Tensor:
    """`(I − b k kᵀ) Diag(a)` of one token `[H, K, K]`, as a matrix; `Diag(a)` where nothing is erased."""
    k, decay = tokens.k[token], tokens.decay[token].reshape(tokens.k.shape[1], -1)
    diagonal = torch.diag_embed(decay.expand_as(k))
    if tokens.beta is None:
        return diagonal
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    return (eye - tokens.beta[token][:, None, None] * k[:, :, None] * k[:, None, :]) @ diagonal


def run_tokens(tokens: Tokens, state: torch.Tensor) -> Ran:
    """`S ← T_t S + b k vᵀ`, `o = Sᵀ q`, for every token."""
    outputs = torch.empty_like(tokens.v)
    for token in range(len(tokens)):
        written = tokens.written[token][:, None, None] * tokens.k[token][:, :, None] * tokens.v[token][:, None, :]
        state = token_transition(tokens, token) @ state + written
        outputs[token] = (state.transpose(1, 2) @ tokens.q[token][:, :, None])[..., 0]
    return Ran(outputs, state)


def body_maps(tokens: Tokens) -> Maps:
    """The ordered product of the tokens' transitions, and the state from a zero start."""
    heads, keys = tokens.k.shape[1:]
    transition = torch.eye(keys, dtype=tokens.k.dtype).repeat(heads, 1, 1)
    for token in range(len(tokens)):
        transition = token_transition(tokens, token) @ transition
    empty = torch.zeros(heads, keys, tokens.v.shape[-1], dtype=tokens.k.dtype)
    return Maps(transition, run_tokens(tokens, empty).state)


def convolve(rows: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution of `[N, C]` with taps `[C, K]` behind a tail `[K − 1, C]`."""
    history = torch.cat([tail, rows])
    taps = weight.shape[1]
    outputs = torch.zeros_like(rows)
    for token in range(rows.shape[0]):
        for tap in range(taps):
            outputs[token] += history[token + tap] * weight[:, tap]
    return outputs


def rotate(heads: torch.Tensor, positions: torch.Tensor, theta: float, rotary_dim: int) -> torch.Tensor:
    """Partial half-split rotary of `[N, H, D]` at positions `[N]`, as products of complex numbers."""
    half = rotary_dim // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / rotary_dim)
    turns = torch.polar(torch.ones(1, dtype=torch.float64), positions.double()[:, None, None] * frequencies)
    turned = torch.complex(heads[..., :half].double(), heads[..., half:rotary_dim].double()) * turns
    return torch.cat([turned.real, turned.imag, heads[..., rotary_dim:].double()], dim=-1)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """Dense attention of rotated queries `[N, Hq, D]` over rotated keys `[M, Hkv, D]`; visible `[N, M]`."""
    group = queries.shape[1] // keys.shape[1]
    outputs = torch.empty(*queries.shape[:2], values.shape[-1], dtype=torch.float64)
    for head in range(queries.shape[1]):
        scores = queries[:, head].double() @ keys[:, head // group].double().T * scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outputs[:, head] = weights @ values[:, head // group].double()
    return outputs


class Rule(StrEnum):
    """The recurrences of design §3."""

    GATED_DELTA = "gated_delta"
    KIMI_DELTA = "kimi_delta"
    LIGHTNING = "lightning"
    DIAGONAL = "diagonal"

    @property
    def every_channel(self) -> bool:
        """Whether every key channel decays on its own."""
        return self in (Rule.KIMI_DELTA, Rule.DIAGONAL)

    @property
    def erases(self) -> bool:
        """Whether it is a delta rule."""
        return self in (Rule.GATED_DELTA, Rule.KIMI_DELTA)

    def compact(self, transition: torch.Tensor) -> torch.Tensor:
        """A dense transition `[..., K, K]` in the form that the engine keeps."""
        if self.erases:
            return transition
        diagonal = transition.diagonal(dim1=-2, dim2=-1)[..., None].contiguous()
        return diagonal if self.every_channel else diagonal[..., :1, :]


def draw_tokens(
    count: int, heads: int, key_dim: int, value_dim: int, seed: int, rule: Rule = Rule.GATED_DELTA
) -> Tokens:
    """Random tokens whose gates remember: a head keeps between 6 and 94 % over 200 tokens, and little is overwritten."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    rates = torch.linspace(0.0004, 0.0125, heads, dtype=torch.float64)
    jitter = 0.9 + 0.2 * uniform(count, heads)
    steps = rates * jitter
    if rule.every_channel:
        steps = steps[..., None] * torch.linspace(0.3, 1.0, key_dim, dtype=torch.float64)
    return Tokens(
        q=torch.nn.functional.normalize(normal(count, heads, key_dim), dim=-1) * key_dim**-0.5,
        k=torch.nn.functional.normalize(normal(count, heads, key_dim) + 0.5, dim=-1),
        v=normal(count, heads, value_dim),
        decay=(-steps).exp(),
        beta=0.02 + 0.13 * uniform(count, heads) if rule.erases else None,
    )
