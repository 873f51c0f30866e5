"""Memory that layers share: page pools of attention layers and state slots of linear layers, sized before loading."""

from dataclasses import dataclass, field

import torch

from services.worker.mixers.batch import LinearSlots
from services.worker.mixers.gated_attention import FullAttentionShape, PagePool
from services.worker.mixers.gated_delta import GatedDeltaShape

__all__ = ["DeviceMemory"]


@dataclass(slots=True)
class DeviceMemory:
    """Allocates each layer's pool as the model is built.

    num_pages pages of page_size tokens in every attention layer; num_slots running states in every linear layer.
    """

    device: torch.device
    dtype: torch.dtype
    num_pages: int
    page_size: int
    num_slots: int
    page_pools: list[PagePool] = field(default_factory=list)
    linear_slots: list[LinearSlots] = field(default_factory=list)

    def add_page_pool(self, shape: FullAttentionShape) -> PagePool:
        """The pool of the next attention layer."""
        size = (self.num_pages, self.page_size, shape.num_kv_heads, shape.head_dim)
        pool = PagePool(
            torch.empty(size, device=self.device, dtype=self.dtype),
            torch.empty(size, device=self.device, dtype=self.dtype),
        )
        self.page_pools.append(pool)
        return pool

    def add_linear_slots(self, shape: GatedDeltaShape) -> LinearSlots:
        """The running states of the next linear layer."""
        slots = LinearSlots(
            torch.zeros(self.num_slots, shape.num_value_heads, shape.key_dim, shape.value_dim, device=self.device),
            torch.zeros(self.num_slots, shape.conv_taps - 1, shape.conv_channels, device=self.device, dtype=self.dtype),
        )
        self.linear_slots.append(slots)
        return slots

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token over all attention layers."""
        return sum(pool.keys[0, 0].nbytes + pool.values[0, 0].nbytes for pool in self.page_pools)
