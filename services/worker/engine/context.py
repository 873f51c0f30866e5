"""What every pass of the engine works with."""

from dataclasses import dataclass

import torch

from services.blob.encodings import EXACT, StateEncoding
from services.worker.engine.pages import PageAllocator, PageHolds, SlotAllocator
from services.worker.engine.seam import SeamWindow
from services.worker.engine.side_stream import SideStream
from services.worker.engine.states import StateStore
from services.worker.mixers.state import DeviceMemory
from services.worker.models.decoder import Model
from services.worker.ops.columns import send_columns

__all__ = ["CaptureProfile", "EngineContext", "capture_chunk"]

_CPU_CHUNK_TOKENS, _GPU_CHUNK_TOKENS = 512, 4096


def capture_chunk(device: torch.device) -> int:
    """Tokens of a capture chunk: every chunk reads all weights once, which a GPU pays for dearly and a CPU hardly notices.

    It depends on nothing but the device, since another chunk rounds differently.
    """
    return _CPU_CHUNK_TOKENS if device.type == "cpu" else _GPU_CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class CaptureProfile:
    """What changes the bytes of a segment state, as far as the engine is concerned.

    seam_window: how many tokens are recomputed at every use; prime_ids: tokens run ahead of a segment at capture;
    chunk_tokens: the fixed chunks in which segments are captured from their own start; `capture_chunk` has a device's;
    encoding: captured transitions and end states are what it gives back, so that a state has the same bytes before and after
    it has been stored.
    """

    seam_window: SeamWindow
    prime_ids: tuple[int, ...]
    chunk_tokens: int = _CPU_CHUNK_TOKENS
    encoding: StateEncoding = EXACT


@dataclass(frozen=True, slots=True)
class EngineContext:
    """One model with its memory. holds: pages of states that are being copied out of it or into it; copies: where they are."""

    model: Model
    memory: DeviceMemory
    pages: PageAllocator
    slots: SlotAllocator
    store: StateStore
    holds: PageHolds
    copies: SideStream
    profile: CaptureProfile

    @classmethod
    def create(cls, model: Model, memory: DeviceMemory, profile: CaptureProfile, state_bytes: int) -> "EngineContext":
        """Allocators over a loaded model's memory; `state_bytes` bounds the planes of stored states."""
        pages = PageAllocator(memory.num_pages, memory.page_size)
        store = StateStore(pages, state_bytes, memory.bytes_per_token * memory.page_size)
        slots, copies = SlotAllocator(memory.num_slots), SideStream(memory.device)
        return cls(model, memory, pages, slots, store, PageHolds(pages), copies, profile)

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.memory.device

    @property
    def is_split(self) -> bool:
        """Other ranks hold a share of the model: a fault that befalls one of them alone must end them all."""
        return self.memory.share.count > 1

    def integers(self, values: list[int] | tuple[int, ...] | range) -> torch.Tensor:
        """An int64 tensor on the device, for which nobody waits."""
        return send_columns([values], self.device, torch.int64)[0]
