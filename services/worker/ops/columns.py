"""Columns of integers that kernels read: several in one transfer, or in tensors that stay where they are."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import ArrayLike

__all__ = ["FixedColumns", "send_columns", "send_into"]

# Columns begin where 16 bytes do, so that a kernel is compiled for pointers of one alignment only.
_ALIGNED = 4
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64}


def _with_gaps(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def send_into(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy from the CPU without waiting for what the device does at the moment; `values` may go at once."""
    pinned = values.pin_memory() if target.is_cuda else values
    target.copy_(pinned, non_blocking=True)


def send_columns(
    columns: Sequence[ArrayLike], device: torch.device, dtype: torch.dtype = torch.int32
) -> tuple[torch.Tensor, ...]:
    """Each on the device, in one transfer."""
    arrays = [np.asarray(column, dtype=_NUMPY[dtype]) for column in columns]
    sizes = [_with_gaps(len(array)) for array in arrays]
    joined = np.zeros(sum(sizes), dtype=_NUMPY[dtype])
    for array, begin in zip(arrays, accumulate(sizes, initial=0), strict=False):
        joined[begin : begin + len(array)] = array
    sent = torch.empty(len(joined), dtype=dtype, device=device)
    send_into(sent, torch.from_numpy(joined))
    return tuple(column[: len(array)] for column, array in zip(sent.split(sizes), arrays, strict=True))


class FixedColumns:
    """Columns for passes that are recorded once and replayed: tensors with room, refilled ahead of each replay.

    fills: what stands behind a column's content; None repeats its last number.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        fills: Sequence[int | None],
        device: torch.device,
        dtype: torch.dtype = torch.int32,
    ) -> None:
        self._sizes = tuple(_with_gaps(size) for size in sizes)
        self._fills = tuple(fills)
        # What is in the room is a number before the first refill, too.
        self._joined = torch.zeros(sum(self._sizes), dtype=dtype, device=device)
        self.tensors = tuple(
            column[:size] for column, size in zip(self._joined.split(list(self._sizes)), sizes, strict=True)
        )

    def refill(self, columns: Sequence[ArrayLike]) -> None:
        """Take over columns, in one transfer.

        Raises:
            ValueError: one is longer than its room.
        """
        dtype = _NUMPY[self._joined.dtype]
        room = np.empty(sum(self._sizes), dtype=dtype)
        starts = accumulate(self._sizes, initial=0)
        rooms = zip(columns, self.tensors, starts, self._sizes, self._fills, strict=False)
        for column, tensor, begin, size, fill in rooms:
            array = np.asarray(column, dtype=dtype)
            if len(array) > len(tensor):
                raise ValueError(f"{len(array)} numbers do not fit into a column of {len(tensor)}")
            room[begin : begin + len(array)] = array
            room[begin + len(array) : begin + size] = array[-1] if fill is None else fill
        send_into(self._joined, torch.from_numpy(room))
