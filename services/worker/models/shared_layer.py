"""A decoder layer of which several ranks hold a share each."""

from dataclasses import dataclass, replace

import torch

from services.worker.mixers.batch import Mixer
from services.worker.mixers.share import Ranks
from services.worker.models.decoder import FeedForward, Layer, Mix, PostNormLayer, PreNormLayer

__all__ = ["SharedLayer"]


@dataclass(frozen=True, slots=True)
class _SharedFeedForward:
    """See `FeedForward`; `share` gives this rank's part of the sum."""

    share: FeedForward
    ranks: Ranks

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `FeedForward`."""
        outputs = self.ranks.sum(self.share(hidden))
        return outputs if residual is None else residual + outputs


@dataclass(frozen=True, slots=True)
class SharedLayer:
    """See `Layer`. Ranks add up behind the mixer's output projection, all rows at once, and behind the feed-forward block.

    Norms, residuals and routers run alike on every rank, over the same bits.
    """

    share: PreNormLayer | PostNormLayer
    ranks: Ranks

    @classmethod
    def of(cls, layer: Layer, ranks: Ranks) -> "SharedLayer":
        """The layer of this rank's heads and channels as a part of the whole one.

        Raises:
            TypeError: its feed-forward block is not known.
        """
        if not isinstance(layer, PreNormLayer | PostNormLayer):
            raise TypeError(f"{type(layer).__name__} is no layer that ranks can share")
        return cls(replace(layer, feed_forward=_SharedFeedForward(layer.feed_forward, ranks)), ranks)

    @property
    def mixer(self) -> Mixer:
        """See `Layer`."""
        return self.share.mixer

    def run(self, hidden: torch.Tensor, mix: Mix) -> torch.Tensor:
        """See `Layer`."""
        return self.share.run(hidden, lambda mixer, normed: self.ranks.sum(mix(mixer, normed)))
