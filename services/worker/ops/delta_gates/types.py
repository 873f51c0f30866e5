"""Arguments of the op."""

from dataclasses import dataclass

import torch

__all__ = ["DeltaGates", "DeltaHeads"]


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Key heads of key_dim channels, value heads of value_dim."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def key_channels(self) -> int:
        """Channels of all keys, or of all queries."""
        return self.num_key_heads * self.key_dim


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """step, beta `[N, H]` as projected, in any dtype and stride; rate, bias `[H]` fp32."""

    step: torch.Tensor
    beta: torch.Tensor
    rate: torch.Tensor
    bias: torch.Tensor
