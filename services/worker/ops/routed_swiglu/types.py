"""What a router decided, and what stands beside the experts that it chose."""

from dataclasses import dataclass

import torch

__all__ = ["Choice", "SharedTerm"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What tokens chose: experts `[N, k]` from the best on, int32; weights `[N, k]` fp32."""

    experts: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedTerm:
    """What a block that every token passes adds: outputs `[N, H]`, scaled by the sigmoid of fp32 logits `[N]` if any."""

    outputs: torch.Tensor
    logits: torch.Tensor | None = None

    def scaled(self, dtype: torch.dtype) -> torch.Tensor:
        """The term `[N, H]` in a dtype that is as wide as the sum."""
        outputs = self.outputs.to(dtype)
        return outputs if self.logits is None else outputs * self.logits.to(dtype).sigmoid()[:, None]
