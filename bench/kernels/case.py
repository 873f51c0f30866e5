"""One kernel on one set of arguments: what it must equal, and what it cannot do without."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Case", "Timed", "draw"]


@dataclass(frozen=True, slots=True)
class Timed:
    """A call to time. num_bytes: read from or written to memory at least once; operations: floating-point ones."""

    call: Callable[[], object]
    num_bytes: float
    operations: float = 0.0


@dataclass(frozen=True, slots=True)
class Case:
    """kernel and reference give the same tensors up to `tolerance`, relative; timed: None where the case only checks."""

    name: str
    kernel: Callable[[], Sequence[torch.Tensor]]
    reference: Callable[[], Sequence[torch.Tensor]]
    tolerance: float
    timed: Timed | None = None

    def error(self) -> float:
        """The largest difference of any tensor over its largest expected value; infinite where a NaN is."""
        pairs = zip(self.kernel(), self.reference(), strict=True)
        return max(_relative_error(actual.double(), expected.double()) for actual, expected in pairs)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((actual - expected).abs().max() / expected.abs().max())
    return float("inf") if math.isnan(error) else error


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers, the same on every run."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)
