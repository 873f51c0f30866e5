"""Columns of integers that kernels read: several in one transfer, or in tensors that stay where they are."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import ArrayLike

__all__ = ["FixedColumns", "send_columns"]


def send_columns(columns: Sequence[ArrayLike], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Each as int32 on the device, in one transfer that does not wait for what the device does at the moment."""
    arrays = [np.asarray(column, dtype=np.int32) for column in columns]
    joined = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        joined = joined.pin_memory()
    sent = joined.to(device, non_blocking=True)
    return tuple(torch.split(sent, [len(array) for array in arrays]))


class FixedColumns:
    """Columns for passes that are recorded once and replayed: int32 tensors with room, refilled ahead of each replay.

    fills: what stands behind a column's content; None repeats its last number.
    """

    def __init__(self, sizes: Sequence[int], fills: Sequence[int | None], device: torch.device) -> None:
        self._sizes = tuple(sizes)
        self._fills = tuple(fills)
        self._joined = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        self.tensors = tuple(torch.split(self._joined, list(sizes)))

    def refill(self, columns: Sequence[ArrayLike]) -> None:
        """Take over columns, in one transfer.

        Raises:
            ValueError: one is longer than its room.
        """
        room = np.empty(sum(self._sizes), dtype=np.int32)
        starts = accumulate(self._sizes, initial=0)
        for column, begin, size, fill in zip(columns, starts, self._sizes, self._fills, strict=False):
            array = np.asarray(column, dtype=np.int32)
            if len(array) > size:
                raise ValueError(f"{len(array)} numbers do not fit into a column of {size}")
            room[begin : begin + len(array)] = array
            room[begin + len(array) : begin + size] = array[-1] if fill is None else fill
        self._joined.copy_(torch.from_numpy(room), non_blocking=True)
