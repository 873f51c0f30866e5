"""A loaded model as its layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from services.worker.mixers.batch import DecodeBatch, Mixer
from services.worker.mixers.linear import LinearMixer
from services.worker.models.spec import ModelSpec, ResidualFactors
from services.worker.ops.norm import add_rms_norm, rms_norm
from services.worker.ops.swiglu import activate

__all__ = ["FeedForward", "Layer", "Mix", "Model", "PostNormLayer", "PreNormLayer", "SwiGlu"]

Mix = Callable[[Mixer, torch.Tensor], torch.Tensor]


class FeedForward(Protocol):
    """What follows a token mixer; every row is on its own."""

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normed hidden states `[N, hidden]` to `[N, hidden]`, added to a residual where there is one."""
        ...


@dataclass(frozen=True, slots=True)
class SwiGlu:
    """`down(silu(gate x) · up x)`, gate and up fused `[2 I, hidden]`."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `FeedForward`."""
        outputs = F.linear(activate(F.linear(hidden, self.gate_up)), self.down)
        return outputs if residual is None else residual + outputs


class Layer(Protocol):
    """A decoder layer: a token mixer and a feed-forward block, tied by its family's residual."""

    @property
    def mixer(self) -> Mixer:
        """The layer's token mixer."""
        ...

    def run(self, hidden: torch.Tensor, mix: Mix) -> torch.Tensor:
        """Hidden states `[N, hidden]` after the layer; `mix` chooses the mixer's pass."""
        ...


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """`x + mixer(norm x)`, then `x + feed_forward(norm x)`."""

    mixer_norm: torch.Tensor
    mixer: Mixer
    feed_forward_norm: torch.Tensor
    feed_forward: FeedForward
    eps: float

    def run(self, hidden: torch.Tensor, mix: Mix) -> torch.Tensor:
        """See `Layer`."""
        mixed = mix(self.mixer, rms_norm(hidden, self.mixer_norm, self.eps))
        hidden, normed = add_rms_norm(hidden, mixed, self.feed_forward_norm, self.eps)
        return self.feed_forward(normed, hidden)


@dataclass(frozen=True, slots=True)
class PostNormLayer:
    """`h = norm x`, `x = α h + β mixer(h)`, then `h = norm x`, `x = α h + β feed_forward(h)`.

    The residual is taken behind the norm: post-norm with scaled residuals (DeepNorm, arXiv 2203.00555), whose norms stand
    at the head of the next block.
    """

    mixer_norm: torch.Tensor
    mixer: Mixer
    feed_forward_norm: torch.Tensor
    feed_forward: FeedForward
    factors: ResidualFactors
    eps: float

    def run(self, hidden: torch.Tensor, mix: Mix) -> torch.Tensor:
        """See `Layer`."""
        factors = self.factors
        normed = rms_norm(hidden, self.mixer_norm, self.eps)
        hidden = factors.mixer_input * normed + factors.mixer_output * mix(self.mixer, normed)
        normed = rms_norm(hidden, self.feed_forward_norm, self.eps)
        return factors.feed_forward_input * normed + factors.feed_forward_output * self.feed_forward(normed)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded decoder."""

    spec: ModelSpec
    embedding: torch.Tensor
    layers: Sequence[Layer]
    final_norm: torch.Tensor
    head: torch.Tensor

    @property
    def linear_mixers(self) -> list[LinearMixer]:
        """The mixers of the linear layers, in order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, LinearMixer)]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[N]` to hidden states `[N, hidden]`."""
        return F.embedding(token_ids, self.embedding)

    def decode(self, token_ids: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """One step of requests' last tokens `[B]`; logits `[B, vocabulary]`."""
        hidden = self.embed(token_ids)
        for layer in self.layers:
            hidden = layer.run(hidden, lambda mixer, normed: mixer.decode(normed, batch))
        return self.logits(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[N, hidden]` to fp32 logits `[N, vocabulary]`."""
        return F.linear(rms_norm(hidden, self.final_norm, self.spec.eps), self.head).float()
