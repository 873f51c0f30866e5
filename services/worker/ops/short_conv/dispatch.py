"""The short convolution in the best form that a device has."""

from collections.abc import Collection, Sequence
from types import ModuleType

import torch

from services.worker.ops.device import runs_kernels
from services.worker.ops.layout import PartWalk
from services.worker.ops.short_conv import chunked
from services.worker.ops.short_conv.types import ConvResult

__all__ = ["step", "walk"]


def _form(inputs: torch.Tensor) -> ModuleType:
    if not runs_kernels(inputs):
        return chunked
    from services.worker.ops.short_conv import triton

    return triton


def walk(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    parts: PartWalk,
    tails: torch.Tensor,
    body_tails: Sequence[torch.Tensor | None],
    keep_after: Collection[int] = (),
) -> ConvResult:
    """As `naive.walk`."""
    result: ConvResult = _form(inputs).walk(inputs, weight, parts, tails, body_tails, keep_after)
    return result


def step(inputs: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """As `naive.step`."""
    outputs: torch.Tensor = _form(inputs).step(inputs, weight, tails, slots)
    return outputs
