"""Arguments and results of the delta rule ops."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["DeltaInputs", "ScanResult", "WalkResult"]


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What the tokens bring, packed.

    q, k: `[N, H, K]`; v: `[N, H, V]`; log_decay, beta: `[N, H]`. H counts value heads; key heads come repeated.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor

    def __post_init__(self) -> None:
        tokens, heads, _ = self.v.shape
        if self.q.shape != self.k.shape or self.k.shape[:2] != (tokens, heads):
            raise ValueError(f"q {tuple(self.q.shape)} and k {tuple(self.k.shape)} do not fit v {tuple(self.v.shape)}")
        if self.log_decay.shape != (tokens, heads) or self.beta.shape != (tokens, heads):
            raise ValueError(f"log_decay and beta must be {(tokens, heads)}")

    def __getitem__(self, tokens: slice | torch.Tensor) -> "DeltaInputs":
        return DeltaInputs(self.q[tokens], self.k[tokens], self.v[tokens], self.log_decay[tokens], self.beta[tokens])


@dataclass(frozen=True, slots=True)
class ScanResult:
    """outputs `[N, H, V]`; states `[R, H, K, V]`; transitions `[R, H, K, K]`, None where none were asked for."""

    outputs: torch.Tensor
    states: torch.Tensor
    transitions: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class WalkResult:
    """outputs `[N, H, V]`; states `[B, H, K, V]` after the last part; kept: state `[H, K, V]` after the parts asked."""

    outputs: torch.Tensor
    states: torch.Tensor
    kept: Mapping[int, torch.Tensor]
