"""The result of the convolution ops."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["ConvResult"]


@dataclass(frozen=True, slots=True)
class ConvResult:
    """outputs `[N, C]`; tails `[B, K − 1, C]` after the last part; kept: tail after the parts asked."""

    outputs: torch.Tensor
    tails: torch.Tensor
    kept: Mapping[int, torch.Tensor]
