"""What a family's config says, and a model as its layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.worker.mixers.batch import Mixer
from services.worker.mixers.gated_attention import FullAttentionShape
from services.worker.mixers.gated_delta import GatedDeltaShape
from services.worker.ops.norm import rms_norm

__all__ = ["FeedForward", "Layer", "Model", "ModelSpec"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes of a decoder. `mixers` has one entry a layer."""

    family: str
    hidden_size: int
    feed_forward_size: int
    vocab_size: int
    context_length: int
    tied_head: bool
    eps: float
    mixers: tuple[GatedDeltaShape | FullAttentionShape, ...]

    @property
    def conv_history(self) -> int:
        """Inputs that a convolution tail holds: `taps − 1`, 0 without linear layers."""
        return max((mixer.conv_taps - 1 for mixer in self.mixers if isinstance(mixer, GatedDeltaShape)), default=0)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """SwiGLU: `down(silu(gate x) · up x)`, gate and up fused `[2 I, hidden]`."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[N, hidden]` to `[N, hidden]`."""
        gate, up = F.linear(hidden, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


@dataclass(frozen=True, slots=True)
class Layer:
    """Pre-norm residual layer."""

    mixer_norm: torch.Tensor
    mixer: Mixer
    feed_forward_norm: torch.Tensor
    feed_forward: FeedForward
    eps: float

    def run(self, hidden: torch.Tensor, mix: Callable[[Mixer, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Hidden states `[N, hidden]` after the layer; `mix` chooses the mixer's pass."""
        hidden = hidden + mix(self.mixer, rms_norm(hidden, self.mixer_norm, self.eps))
        return hidden + self.feed_forward(rms_norm(hidden, self.feed_forward_norm, self.eps))


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded decoder."""

    spec: ModelSpec
    embedding: torch.Tensor
    layers: Sequence[Layer]
    final_norm: torch.Tensor
    head: torch.Tensor

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[N]` to hidden states `[N, hidden]`."""
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[N, hidden]` to fp32 logits `[N, vocabulary]`."""
        return F.linear(rms_norm(hidden, self.final_norm, self.spec.eps), self.head).float()
