"""Combined prompts that wait for another engine to take their decode state, and that state layer by layer."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from services.worker.engine.combine import Prompt
from services.worker.engine.context import EngineContext
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.mixers.shapes import PageShape

__all__ = ["HeldPrompts", "OutgoingPrompt", "held_bytes"]


def held_bytes(context: EngineContext, num_tokens: int) -> int:
    """What the decode state of a prompt weighs."""
    states = sum(state.state_bytes(context.memory.dtype.itemsize) for state in context.model.spec.states)
    return states + num_tokens * context.memory.bytes_per_token


@dataclass(slots=True)
class _Held:
    prompt: Prompt
    is_read: bool = False
    is_cancelled: bool = False


class HeldPrompts:
    """By request. A prompt is read at most once; what is cancelled while it is read goes when reading ends."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Prompt]:
        return iter([held.prompt for held in self._held.values()])

    def add(self, request_id: str, prompt: Prompt) -> None:
        """Keep a combined prompt: its pages and its slot become those of this object."""
        self._held[request_id] = _Held(prompt)

    def open(self, request_id: str) -> "OutgoingPrompt | None":
        """Begin to read; None where nothing is held, or somebody has begun before. Call `close` behind it."""
        held = self._held.get(request_id)
        if held is None or held.is_read:
            return None
        held.is_read = True
        return OutgoingPrompt(self._context, held.prompt)

    def close(self, request_id: str) -> None:
        """Reading has ended, however it did."""
        self._release(request_id)

    def cancel(self, request_id: str) -> None:
        """Nobody wants it any more; unknown ids are ignored."""
        held = self._held.get(request_id)
        if held is None:
            return
        if held.is_read:
            held.is_cancelled = True
        else:
            self._release(request_id)

    def is_cancelled(self, request_id: str) -> bool:
        """Whether reading on is of no use."""
        held = self._held.get(request_id)
        return held is None or held.is_cancelled

    def _release(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            held.prompt.release(self._context)


class OutgoingPrompt:
    """The decode state of a held prompt on its way out. Made on the engine's thread; layers are read on any."""

    def __init__(self, context: EngineContext, prompt: Prompt) -> None:
        self._context = context
        self._slot = prompt.slot
        rows = sorted(prompt.table.rows, key=lambda row: row.first)
        size = context.pages.page_size
        self._slots = context.integers([slot for row in rows for slot in row.slots(size)])
        self._bases = context.integers([row.base for row in rows for _ in range(row.count)])
        context.copies.follow()

    @torch.inference_mode()
    def read_layer(self, layer: int) -> dict[str, torch.Tensor]:
        """One layer's planes in host memory, by name.

        `state` `[H, K, V]` fp32 and `tail` `[taps − 1, C]`; or `keys` `[N, Hkv, D]`, rotated by their true positions, and
        `values` `[N, Hkv, Dv]`, in the prompt's order.
        """
        context = self._context
        kept, mixer = context.model.spec.kept, context.model.layers[layer].mixer
        index = [isinstance(own, PageShape) for own in kept[:layer]].count(isinstance(kept[layer], PageShape))
        with context.copies.used():
            if isinstance(mixer, PagedAttention):
                planes = dict(context.memory.page_pools[index].planes(self._slots))
                if mixer.rotary is not None:
                    keys = planes["keys"]
                    # In fp32: what is rounded once more here is all that sets these keys apart from an engine's own.
                    planes["keys"] = mixer.rotary.rotate(keys.float(), self._bases).to(keys.dtype)
            else:
                slots = context.memory.linear_slots[index]
                planes = {"state": slots.states[self._slot], "tail": slots.tails[self._slot]}
            return {name: tensor.cpu() for name, tensor in planes.items()}
