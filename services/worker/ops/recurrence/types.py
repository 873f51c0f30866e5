"""Arguments and results of the recurrence ops."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["CaptureResult", "RecurrenceInputs", "ScanResult", "SlotStates", "WalkResult", "identities"]


@dataclass(frozen=True, slots=True)
class RecurrenceInputs:
    """What the tokens bring, packed.

    q, k: `[N, Hk, K]`; v: `[N, H, V]`; log_decay: `[N, H]`, or `[N, H, K]` where every key channel decays on its own;
    beta: `[N, H]` of a delta rule, None where nothing is erased. H counts value heads, of which `repeats` neighbours share a
    key head; decays of every channel have a key head each. q, k and v are fp32, or of a half dtype for kernels.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor | None

    def __post_init__(self) -> None:
        tokens, heads, _ = self.v.shape
        if self.q.shape != self.k.shape or self.k.shape[0] != tokens or heads % self.k.shape[1]:
            raise ValueError(f"q {tuple(self.q.shape)} and k {tuple(self.k.shape)} do not fit v {tuple(self.v.shape)}")
        of_channels = (tokens, heads, self.k.shape[-1]) if self.repeats == 1 else None
        if self.log_decay.shape not in ((tokens, heads), of_channels):
            raise ValueError(f"log_decay must be {(tokens, heads)} or {of_channels}")
        if self.beta is not None and self.beta.shape != (tokens, heads):
            raise ValueError(f"beta must be {(tokens, heads)}")

    @property
    def repeats(self) -> int:
        """Value heads of a key head."""
        return self.v.shape[1] // self.k.shape[1]

    def spread(self) -> "RecurrenceInputs":
        """The same with a key head for every value head."""
        if self.repeats == 1:
            return self
        q, k = (heads.repeat_interleave(self.repeats, dim=1) for heads in (self.q, self.k))
        return RecurrenceInputs(q, k, self.v, self.log_decay, self.beta)

    def __getitem__(self, tokens: slice | torch.Tensor) -> "RecurrenceInputs":
        beta = None if self.beta is None else self.beta[tokens]
        return RecurrenceInputs(self.q[tokens], self.k[tokens], self.v[tokens], self.log_decay[tokens], beta)

    @property
    def log_bound(self) -> torch.Tensor:
        """`[N, H]`: the logarithm of what bounds one token's transition, its slowest decay."""
        return self.log_decay if self.log_decay.ndim == 2 else self.log_decay.amax(-1)


@dataclass(frozen=True, slots=True)
class ScanResult:
    """outputs `[N, H, V]`; states `[R, H, K, V]`; transitions as they were given, None where none were asked for."""

    outputs: torch.Tensor
    states: torch.Tensor
    transitions: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """outputs `[N, H, V]`; states `[R, H, K, V]` behind every run; seam_states: where its seam ends; transitions: of bodies."""

    outputs: torch.Tensor
    states: torch.Tensor
    seam_states: torch.Tensor
    transitions: torch.Tensor


@dataclass(frozen=True, slots=True)
class WalkResult:
    """outputs `[N, H, V]`; states `[B, H, K, V]` after the last part; kept: state `[H, K, V]` after the parts asked."""

    outputs: torch.Tensor
    states: torch.Tensor
    kept: Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SlotStates:
    """States that a walk moves where they stand: held `[slots, H, K, V]`; slots `[B]`: where every request's is.

    is_fresh `[B]`: requests that begin with nothing, whatever their slots hold; None where every slot holds what its request
    begins with.
    """

    held: torch.Tensor
    slots: torch.Tensor
    is_fresh: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """What the requests begin with, `[B, H, K, V]`."""
        own = self.held[self.slots]
        if self.is_fresh is not None:
            own.masked_fill_(self.is_fresh.view(-1, 1, 1, 1), 0.0)
        return own

    def write(self, states: torch.Tensor) -> None:
        """What they end with."""
        self.held[self.slots] = states


def identities(inputs: RecurrenceInputs, count: int) -> torch.Tensor:
    """The transitions of runs without tokens: `[n, H, K, K]`, or where nothing is erased `[n, H, K, 1]` or `[n, H, 1, 1]`."""
    heads, key_dim, like = inputs.v.shape[1], inputs.k.shape[-1], inputs.log_decay
    if inputs.beta is None:
        return like.new_ones(count, heads, key_dim if like.ndim == 3 else 1, 1)
    return torch.eye(key_dim, dtype=like.dtype, device=like.device).expand(count, heads, key_dim, key_dim)
