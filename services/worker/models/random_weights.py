"""Weights drawn on the device from a seed, for measuring true shapes without a checkpoint's bytes."""

import math
from dataclasses import dataclass, field

import torch

from services.worker.models.cuts import Cut

__all__ = ["RandomWeights"]

# A head keeps between 5 and 95 % of its state over 2,048 tokens: e^(−r·2048).
_SLOWEST, _FASTEST = 2.5e-5, 1.46e-3
# softplus of it is 1, so that a gate's rate is its head's.
_RESTING_STEP = 0.5413


@dataclass(slots=True)
class RandomWeights:
    """A `Checkpoint` that holds whatever it is asked for, in the layout that loaders prefer.

    A cut is drawn whole, so that ranks of one seed hold shares of one model: for a moment the whole tensor is on the device.
    Matrices are normal with a variance of one over their inputs; norms lie about one. Gates of delta rules remember: the
    rates of a layer's heads are spread evenly, on a logarithmic scale, so that no transition may be left out.
    """

    device: torch.device
    seed: int
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    def names(self) -> frozenset[str]:
        """No tensor is in any special layout."""
        return frozenset()

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut | None = None) -> torch.Tensor:
        """A tensor on the device, or what a cut takes of it."""
        whole = self._draw(name, shape, dtype)
        return whole if cut is None else cut.apply(whole)

    def _draw(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        kind = name.rpartition(".")[2] if not name.endswith(".weight") else name.split(".")[-2]
        if kind == "A_log":
            rates = torch.linspace(math.log(_SLOWEST), math.log(_FASTEST), math.prod(shape), device=self.device)
            return rates.reshape(shape).to(dtype)
        if kind == "dt_bias":
            return torch.full(shape, _RESTING_STEP, device=self.device, dtype=dtype)
        drawn = torch.randn(shape, device=self.device, dtype=dtype, generator=self._generator)
        if len(shape) == 1:
            return drawn.mul_(0.1).add_(1.0) if "norm" in kind else drawn.mul_(0.1)
        # Steps that vary a little about their rest.
        scale = 0.1 if kind in ("in_proj_a", "f_b_proj") else 1.0
        return drawn.mul_(scale * math.prod(shape[1:]) ** -0.5)
