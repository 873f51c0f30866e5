"""What a checkpoint's config says: shapes, before any weight is read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from services.worker.mixers.shapes import MixerShape, PageShape, StateShape
from services.worker.mixers.share import Share

__all__ = ["DenseShape", "FeedForwardShape", "LayerSpec", "ModelSpec", "ResidualFactors"]


class FeedForwardShape(Protocol):
    """A family's shape of one feed-forward block."""

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the block."""
        ...

    def num_active_parameters(self, hidden_size: int) -> int:
        """Weights that one token passes through."""
        ...

    def split(self, share: Share) -> "FeedForwardShape":
        """The channels of a share.

        Raises:
            SplitError: shares would not be equal.
        """
        ...


@dataclass(frozen=True, slots=True)
class DenseShape:
    """One SwiGLU block of `size` channels."""

    size: int

    def num_parameters(self, hidden_size: int) -> int:
        """See `FeedForwardShape`: gate, up and down."""
        return 3 * self.size * hidden_size

    def num_active_parameters(self, hidden_size: int) -> int:
        """See `FeedForwardShape`: all of them."""
        return self.num_parameters(hidden_size)

    def split(self, share: Share) -> "DenseShape":
        """See `FeedForwardShape`."""
        return DenseShape(share.of(self.size, "channels of a feed-forward block"))


@dataclass(frozen=True, slots=True)
class ResidualFactors:
    """How much of a block's input and output its residual takes, at the token mixer and at the feed-forward block."""

    mixer_input: float
    mixer_output: float
    feed_forward_input: float
    feed_forward_output: float


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer; residual is None where input and output are added as they are."""

    mixer: MixerShape
    feed_forward: FeedForwardShape
    residual: ResidualFactors | None = None

    def split(self, share: Share) -> "LayerSpec":
        """The heads and channels of a share.

        Raises:
            SplitError: shares would not be equal.
        """
        return replace(self, mixer=self.mixer.split(share), feed_forward=self.feed_forward.split(share))


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a decoder; `eps` is that of the layers' norms."""

    family: str
    hidden_size: int
    vocab_size: int
    context_length: int
    tied_head: bool
    eps: float
    layers: tuple[LayerSpec, ...]

    @cached_property
    def kept(self) -> tuple[StateShape | PageShape, ...]:
        """What every layer keeps of the tokens it has seen."""
        return tuple(layer.mixer.kept for layer in self.layers)

    @property
    def states(self) -> Iterator[StateShape]:
        """What the linear layers keep."""
        return (kept for kept in self.kept if isinstance(kept, StateShape))

    @property
    def pages(self) -> Iterator[PageShape]:
        """What the attention layers keep."""
        return (kept for kept in self.kept if isinstance(kept, PageShape))

    @cached_property
    def conv_history(self) -> int:
        """Inputs that a convolution tail holds: `taps − 1`, 0 without convolutions."""
        return max((state.conv_taps - 1 for state in self.states), default=0)

    def split(self, share: Share) -> "ModelSpec":
        """What a rank holds: every layer's share; embedding and head are whole.

        Raises:
            SplitError: shares would not be equal.
        """
        return self if share.count == 1 else replace(self, layers=tuple(layer.split(share) for layer in self.layers))

    def token_bytes(self, itemsize: int) -> int:
        """What one token keeps over all attention layers, `itemsize` bytes a value."""
        return sum(page.token_bytes(itemsize) for page in self.pages)
