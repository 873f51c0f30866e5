"""Token sampling: greedy, or temperature with top-k and nucleus filters, reproducible by seed."""

import math
from dataclasses import dataclass

import torch

__all__ = ["Likeliest", "Sampler", "SamplingOptions", "find_likeliest", "pick_likeliest", "read_likeliest"]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """temperature 0 is greedy; top_k 0 keeps all; seed None draws one."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if not self.temperature >= 0.0 or not 0.0 < self.top_p <= 1.0 or self.top_k < 0:
            raise ValueError("temperature and top_k must not be negative, top_p must lie in (0, 1]")


@dataclass(frozen=True, slots=True)
class Likeliest:
    """The token of the largest logit, and that logit."""

    token: int
    logit: float


def pick_likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Token and logit `[B, 2]` of every row of logits `[B, vocabulary]`, fp64; a NaN is larger than every number."""
    values, tokens = logits.max(-1)
    # An index of a vocabulary is exact in fp64.
    return torch.stack([tokens.double(), values.double()], dim=-1)


def read_likeliest(picked: torch.Tensor) -> list[Likeliest]:
    """What `pick_likeliest` has picked, in one transfer, for which the host waits."""
    return [Likeliest(int(token), logit) for token, logit in picked.tolist()]


def find_likeliest(logits: torch.Tensor) -> list[Likeliest]:
    """Both."""
    return read_likeliest(pick_likeliest(logits))


class Sampler:
    """Draws one request's tokens. The same seed and logits give the same tokens, whatever else is in the batch."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    def draw(self, logits: torch.Tensor, likeliest: Likeliest) -> int:
        """A token from fp32 logits `[vocabulary]`, whose largest is known.

        Raises:
            ValueError: a logit is no number, or the largest is infinite.
        """
        if not math.isfinite(likeliest.logit):
            raise ValueError("the model's logits are not finite; its weights or dtype cannot represent this prompt")
        if self._options.temperature == 0.0:
            return likeliest.token
        # The generator lives on the CPU, so that a seed means the same on every device.
        wide = logits.cpu().double()
        # A difference of zero survives every temperature; a large logit over a tiny one would overflow.
        scaled = (wide - wide.max()) / self._options.temperature
        weights = self._nucleus(self._top_k(scaled).softmax(-1))
        return int(torch.multinomial(weights, 1, generator=self._generator))

    def _top_k(self, logits: torch.Tensor) -> torch.Tensor:
        top_k = self._options.top_k
        if not 0 < top_k < logits.shape[-1]:
            return logits
        return logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))

    def _nucleus(self, weights: torch.Tensor) -> torch.Tensor:
        """Keeps the likeliest tokens until their sum reaches top_p; at least one."""
        if self._options.top_p >= 1.0:
            return weights
        ordered, indices = weights.sort(descending=True)
        outside = ordered.cumsum(-1) - ordered >= self._options.top_p
        return torch.zeros_like(weights).scatter(0, indices, ordered.masked_fill(outside, 0.0))
