"""Memory that layers share: page pools of attention layers and state slots of linear layers, sized before loading."""

from dataclasses import dataclass, field

import torch

from services.worker.mixers.batch import LinearSlots
from services.worker.mixers.paged_attention import PagePool
from services.worker.mixers.shapes import PageShape, StateShape
from services.worker.mixers.share import WHOLE, Ranks, Share

__all__ = ["DeviceMemory"]


@dataclass(slots=True)
class DeviceMemory:
    """Allocates each layer's pool as the model is built.

    num_pages pages of page_size tokens in every attention layer; num_slots running states in every linear layer; ranks:
    with which others the model is held, None where this device holds all of it. Shapes are those of this device's share.
    """

    device: torch.device
    dtype: torch.dtype
    num_pages: int
    page_size: int
    num_slots: int
    ranks: Ranks | None = None
    page_pools: list[PagePool] = field(default_factory=list)
    linear_slots: list[LinearSlots] = field(default_factory=list)

    @property
    def share(self) -> Share:
        """What this device holds of a model."""
        return WHOLE if self.ranks is None else self.ranks.share

    def add_page_pool(self, shape: PageShape) -> PagePool:
        """The pool of the next attention layer."""
        keys = self._page_tensor(shape.num_kv_heads, shape.key_dim)
        if shape.latent:
            pool = PagePool(keys, keys[..., -shape.value_dim :], latent=True)
        else:
            pool = PagePool(keys, self._page_tensor(shape.num_kv_heads, shape.value_dim))
        self.page_pools.append(pool)
        return pool

    def _page_tensor(self, heads: int, channels: int) -> torch.Tensor:
        size = (self.num_pages, self.page_size, heads, channels)
        return torch.empty(size, device=self.device, dtype=self.dtype)

    def add_linear_slots(self, shape: StateShape) -> LinearSlots:
        """The running states of the next linear layer."""
        state = (self.num_slots, shape.num_heads, shape.key_dim, shape.value_dim)
        tail = (self.num_slots, shape.conv_taps - 1, shape.conv_channels)
        slots = LinearSlots(
            len(self.linear_slots),
            torch.zeros(state, device=self.device),
            torch.zeros(tail, device=self.device, dtype=self.dtype),
        )
        self.linear_slots.append(slots)
        return slots

    @property
    def bytes_per_token(self) -> int:
        """What one token keeps over all attention layers."""
        return sum(pool.bytes_per_token for pool in self.page_pools)
