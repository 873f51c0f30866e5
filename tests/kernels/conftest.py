"""Kernels on small shapes: in Triton's interpreter on the CPU, compiled where `HYPIC_DEVICE` names a GPU."""

import os
from collections.abc import Callable

import pytest
import torch

from tests.kernels.interpreter import adapt_interpreter

pytest.importorskip("triton", reason="triton is not installed; it has no wheel for this platform")
if "TRITON_INTERPRET" in os.environ:
    adapt_interpreter()

Allocate = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN into memory that nobody has written: what a kernel leaves out, or reads too early, is seen in its result."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate: Allocate) -> Allocate:
    def allocate_poisoned(*args: object, **options: object) -> torch.Tensor:
        fresh = allocate(*args, **options)
        return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

    return allocate_poisoned
