"""The short causal convolution ahead of a linear mixer, over live runs and the tails of stored bodies.

`y_t = Σ_j weight[:, j] x_(t−K+1+j)`, one filter a channel, no activation. A tail is the last `K − 1` inputs `[K − 1, C]`,
before convolution and activation; a run shorter than `K − 1` continues the tail before it.
"""

from services.worker.ops.short_conv.types import ConvResult

__all__ = ["ConvResult"]
