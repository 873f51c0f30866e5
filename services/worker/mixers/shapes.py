"""What a layer keeps of the tokens it has seen, whatever its family: a state of fixed size, or pages that grow."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from services.worker.mixers.share import Share

__all__ = ["MixerShape", "PageShape", "StateShape", "TransitionKind"]


class TransitionKind(StrEnum):
    """The form of a body's transition: `[K, K]`, `[K, 1]` or one number a head."""

    DENSE = "dense"
    DIAGONAL = "diagonal"
    SCALAR = "scalar"


@dataclass(frozen=True, slots=True)
class StateShape:
    """A linear layer's recurrent state `[H, K, V]` in fp32, and its convolution's tail `[taps − 1, C]` in the model's dtype.

    conv_taps is 1, and conv_channels 0, where the family has no convolution.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    transition: TransitionKind
    conv_taps: int = 1
    conv_channels: int = 0

    @property
    def transition_shape(self) -> tuple[int, int, int]:
        """`[H, K, K]`, `[H, K, 1]` or `[H, 1, 1]`."""
        match self.transition:
            case TransitionKind.DENSE:
                return (self.num_heads, self.key_dim, self.key_dim)
            case TransitionKind.DIAGONAL:
                return (self.num_heads, self.key_dim, 1)
            case TransitionKind.SCALAR:
                return (self.num_heads, 1, 1)

    def identity(self, device: torch.device) -> torch.Tensor:
        """The transition of a run without tokens, fp32."""
        if self.transition is TransitionKind.DENSE:
            return torch.eye(self.key_dim, device=device).expand(self.transition_shape)
        return torch.ones(self.transition_shape, device=device)

    def state_bytes(self, itemsize: int) -> int:
        """One running state with its tail, whose values take `itemsize` bytes."""
        tail = (self.conv_taps - 1) * self.conv_channels
        return 4 * self.num_heads * self.key_dim * self.value_dim + itemsize * tail

    def plane_bytes(self, itemsize: int) -> int:
        """What a segment state keeps: transition, end state, decay and tail."""
        heads, rows, columns = self.transition_shape
        return self.state_bytes(itemsize) + 4 * heads * (rows * columns + 1)


@dataclass(frozen=True, slots=True)
class PageShape:
    """What an attention layer keeps of a token: keys `[Hkv, D]` and values `[Hkv, Dv]` in the model's dtype.

    latent: values are the last `Dv` channels of the keys, and stored once (multi-head latent attention).
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False

    @property
    def latent_dim(self) -> int | None:
        """Channels of a key that are its value too, None where values are kept apart."""
        return self.value_dim if self.latent else None

    def token_bytes(self, itemsize: int) -> int:
        """One token."""
        return itemsize * self.num_kv_heads * (self.key_dim + (0 if self.latent else self.value_dim))


class MixerShape(Protocol):
    """A family's shape of one token mixer."""

    @property
    def kept(self) -> StateShape | PageShape:
        """What the layer keeps."""
        ...

    def split(self, share: Share) -> "MixerShape":
        """The heads of a share.

        Raises:
            SplitError: shares would not be equal.
        """
        ...
