"""The engine's model and memory as the evaluation uses them: pages by bump allocation, slots by number."""

from collections.abc import Sequence
from pathlib import Path

import torch

from services.worker.mixers.state import DeviceMemory
from services.worker.models.errors import CheckpointError
from services.worker.models.registry import load_checkpoint

__all__ = ["PAGE_TOKENS", "Arena", "Rig"]

# Refreshed blocks are multiples of it, so that any of them ends where a page does.
PAGE_TOKENS = 8


class Arena:
    """Hands out contiguous pages and takes them all back at once; `mark` and `rewind` nest."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._next = 0

    def take(self, num_tokens: int) -> range:
        """Pages for a run of tokens.

        Raises:
            MemoryError: the arena is used up.
        """
        count = -(-num_tokens // PAGE_TOKENS)
        if self._next + count > self._num_pages:
            raise MemoryError(f"the evaluation's {self._num_pages} pages are used up; lower the batch size")
        pages = range(self._next, self._next + count)
        self._next += count
        return pages

    def mark(self) -> int:
        """How far the arena is used."""
        return self._next

    def rewind(self, mark: int) -> None:
        """Take back everything since a mark."""
        self._next = mark


class Rig:
    """A loaded model with room for `num_tokens` keys and values and `num_slots` running states.

    Raises:
        CheckpointError: it cannot be loaded, or its bodies would have to be placed, which the evaluation does not do.
    """

    def __init__(
        self, checkpoint: Path, device: str, num_tokens: int, num_slots: int, dtype: torch.dtype = torch.float32
    ) -> None:
        pages = num_tokens // PAGE_TOKENS
        self.memory = DeviceMemory(torch.device(device), dtype, pages, PAGE_TOKENS, num_slots)
        self.model = load_checkpoint(checkpoint, self.memory)
        if any(mixer.rotary is not None for mixer in self.model.linear_mixers):
            raise CheckpointError(
                f"{checkpoint}: linear layers with rotary position cannot be evaluated yet; use another model"
            )
        self.arena = Arena(pages)
        self.num_slots = num_slots

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.memory.device

    def integers(self, values: Sequence[int]) -> torch.Tensor:
        """An int64 tensor on the device."""
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)
