"""How the memory of one device is shared: what is fixed first, then pages and states by what a segment takes of each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.worker.inspection.sizes import Sizes
from services.worker.mixers.kimi_delta import KimiDeltaShape
from services.worker.mixers.shapes import MixerShape, StateShape, TransitionKind
from services.worker.models.experts import ExpertsShape
from services.worker.models.spec import DenseShape, FeedForwardShape, ModelSpec
from services.worker.ops.recurrence.chunks import CHANNEL_CHUNK_TOKENS, CHUNK_TOKENS

__all__ = ["MemoryShares", "PassSizes", "share_memory", "workspace_bytes"]

_FP32 = 4
_RECORDED_KINDS = 3
# Segments of so many tokens fill pages and states alike.
_SEGMENT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class PassSizes:
    """The largest passes: tokens of one capture or combine, and requests that run at once.

    recorded_passes: how many sweeps of each kind are kept recorded, of at most `recorded_tokens`; none on a CPU.
    """

    pass_tokens: int
    capture_tokens: int
    max_running: int
    recorded_passes: int = 0
    recorded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Bytes of a device. carries: what captures on their way hold beside pages; negative pages: nothing is left to share.

    recorded: recorded sweeps and the work that those of a kind share.
    """

    weights: int
    slots: int
    carries: int
    workspace: int
    recorded: int
    pages: int
    states: int

    @property
    def fixed(self) -> int:
        """All but pages and states."""
        return self.weights + self.slots + self.carries + self.workspace + self.recorded


def share_memory(total: int, spec: ModelSpec, sizes: Sizes, itemsize: int, passes: PassSizes) -> MemoryShares:
    """Shares of `total` bytes for a model whose values take `itemsize` bytes."""
    planes, pages = sizes.segment.total, _SEGMENT_TOKENS * sizes.token
    packed = -(-passes.capture_tokens // _SEGMENT_TOKENS)
    fixed = MemoryShares(
        weights=sizes.weights,
        slots=passes.max_running * sizes.request_state,
        # States and transitions of a pack of captures and of one that prompts have ordered, each once as they are and once
        # as a pass leaves them.
        carries=4 * packed * planes,
        workspace=workspace_bytes(spec, itemsize, passes.pass_tokens),
        recorded=_recorded_bytes(spec, sizes, itemsize, passes),
        pages=0,
        states=0,
    )
    left = total - fixed.fixed
    states = left * planes // max(1, planes + pages)
    return replace(fixed, pages=left - states, states=states)


def _recorded_bytes(spec: ModelSpec, sizes: Sizes, itemsize: int, passes: PassSizes) -> int:
    """Prompts, prompts that capture, and captures: each kind has work and hidden states of its own, prompts keep a snapshot."""
    hidden = passes.recorded_tokens * spec.hidden_size * itemsize
    of_kind = workspace_bytes(spec, itemsize, passes.recorded_tokens) + hidden
    return _RECORDED_KINDS * of_kind + (_RECORDED_KINDS - 1) * passes.recorded_passes * sizes.request_state


def workspace_bytes(spec: ModelSpec, itemsize: int, num_tokens: int) -> int:
    """What a pass of so many tokens holds at its fullest, between the layers' own tensors.

    Counted are hidden states, one linear layer's chunks and one feed-forward block. On an H200 a capture of 32,768 tokens of
    Qwen3.5-35B-A3B took 7.5 GiB, where this says 8.1.
    """
    mixers = [_recurrence_bytes(layer.mixer, itemsize) for layer in spec.layers]
    blocks = [_block_bytes(layer.feed_forward, spec.hidden_size, itemsize) for layer in spec.layers]
    return num_tokens * (4 * spec.hidden_size * itemsize + max(mixers, default=0) + max(blocks, default=0))


def _recurrence_bytes(mixer: MixerShape, itemsize: int) -> int:
    """One token in the chunked form: inputs, scores, and its part of what its chunk does to a state."""
    state = mixer.kept
    if not isinstance(state, StateShape):
        return 0
    heads, keys, values = state.num_heads, state.key_dim, state.value_dim
    is_dense = state.transition is TransitionKind.DENSE
    chunk = CHANNEL_CHUNK_TOKENS if isinstance(mixer, KimiDeltaShape) else CHUNK_TOKENS
    of_chunk = heads * keys * (2 * values + (keys if is_dense else 0)) // chunk
    of_token = heads * (keys + values + 2 * chunk)
    rows = 3 * (state.conv_channels or 3 * heads * keys) + heads * values
    return _FP32 * (of_chunk + of_token) + itemsize * rows


def _block_bytes(block: FeedForwardShape, hidden: int, itemsize: int) -> int:
    return itemsize * sum(_widths(block, hidden))


def _widths(block: FeedForwardShape, hidden: int) -> Iterator[int]:
    """Channels of what a token's block holds at once."""
    if isinstance(block, ExpertsShape):
        yield block.routing.top_k * (block.size + hidden)
        yield 3 * (block.shared_size or 0)
    elif isinstance(block, DenseShape):
        yield 3 * block.size
