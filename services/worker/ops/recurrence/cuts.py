"""Runs cut into chunks for kernels, and what all of these agree on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from services.worker.ops.recurrence.chunks import CHANNEL_CHUNK_TOKENS, CHUNK_TOKENS
from services.worker.ops.recurrence.types import RecurrenceInputs

__all__ = ["TILE", "Cut", "Tiling", "chunk_tokens", "dot_precision"]

# Rows of a state, or columns of what is folded, that one tile of registers holds.
TILE = 64


@dataclass(frozen=True, slots=True)
class Cut:
    """Runs cut into chunks from their first token on, on the host.

    starts, ends `[M]`: the first token of every chunk and the end of its run; first `[R + 1]`: index of every run's first chunk;
    length: tokens of a full chunk.
    """

    starts: Sequence[int]
    ends: Sequence[int]
    first: Sequence[int]
    length: int

    @classmethod
    def of(cls, cu_runs: Sequence[int], length: int) -> "Cut":
        """Runs between offsets `[R + 1]`."""
        starts: list[int] = []
        ends: list[int] = []
        first = [0]
        for begin, end in pairwise(cu_runs):
            starts += range(begin, end, length)
            ends += [end] * (len(starts) - first[-1])
            first.append(len(starts))
        return cls(starts, ends, first, length)

    def chunks_of(self, run: int) -> range:
        """The indices of a run's chunks."""
        return range(self.first[run], self.first[run + 1])


@dataclass(frozen=True, slots=True)
class Tiling:
    """A `Cut` on the device: starts, ends int32 `[M]`. A chunk that ends where it starts is room that nothing is in."""

    starts: torch.Tensor
    ends: torch.Tensor
    length: int

    @property
    def num_chunks(self) -> int:
        """M."""
        return len(self.starts)


def chunk_tokens(inputs: RecurrenceInputs) -> int:
    """Tokens of a full chunk."""
    return CHUNK_TOKENS if inputs.log_decay.ndim == 2 else CHANNEL_CHUNK_TOKENS


def dot_precision(inputs: RecurrenceInputs) -> str:
    """How dots of two fp32 operands are taken, always in three passes.

    Of tf32 with an error of 1e-6, or of bf16 with one of 1e-5, where inputs of a half dtype have rounded at 4e-3 before. One
    pass of tf32 would be off by 3e-4 in a transition.
    """
    return "tf32x3" if inputs.v.dtype == torch.float32 else "bf16x3"
