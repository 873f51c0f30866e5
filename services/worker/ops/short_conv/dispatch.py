"""The short convolution in the best form that a device has."""

from collections.abc import Collection, Sequence
from types import ModuleType

import torch

from services.worker.ops.device import runs_kernels
from services.worker.ops.layout import BodyAddresses, PartWalk
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
    addresses: BodyAddresses | None = None,
) -> ConvResult:
    """As `naive.walk`; addresses: where the stored tails lie, for kernels."""
    form = _form(inputs)
    if form is chunked:
        return chunked.walk(inputs, weight, parts, tails, body_tails, keep_after)
    result: ConvResult = form.walk(inputs, weight, parts, tails, body_tails, keep_after, addresses)
    return result


def step(inputs: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """As `naive.step`."""
    outputs: torch.Tensor = _form(inputs).step(inputs, weight, tails, slots)
    return outputs
