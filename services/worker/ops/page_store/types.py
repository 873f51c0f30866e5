"""What is stored, and in which form."""

from dataclasses import dataclass

import torch

from services.worker.ops.rotary import Rotary

__all__ = ["FreshTokens", "KeyForm", "KeyNorm"]


@dataclass(frozen=True, slots=True)
class KeyNorm:
    """An `rms_norm` over every key's channels: weight `[D]` in fp32."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class KeyForm:
    """What a layer does to a key before it keeps it: norm, then rotary; None where it does not."""

    norm: KeyNorm | None
    rotary: Rotary | None


@dataclass(frozen=True, slots=True)
class FreshTokens:
    """keys `[N, Hkv, D]` as they are projected; values `[N, Hkv, Dv]`, None where keys hold them; slots `[N]`, flat.

    A kernel leaves out tokens at negative slots: rows that a recorded pass has to spare.
    """

    keys: torch.Tensor
    values: torch.Tensor | None
    slots: torch.Tensor
