"""What a router decided."""

from dataclasses import dataclass

import torch

__all__ = ["Choice"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What tokens chose: experts `[N, k]` from the best on, int64; weights `[N, k]` fp32."""

    experts: torch.Tensor
    weights: torch.Tensor
