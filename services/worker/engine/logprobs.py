"""How likely the model itself held a token, and the likeliest ones: before temperature, filters, penalties and biases."""

from dataclasses import dataclass

import torch

__all__ = ["TokenLogprobs", "find_logprobs"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities. own: of the drawn token; top: the likeliest tokens with theirs, best first."""

    own: float
    top: tuple[tuple[int, float], ...]


def find_logprobs(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Of logits `[vocabulary]`, which stay as they are: the log-softmax in fp64, in one transfer for which the host waits."""
    logprobs = logits.double().log_softmax(-1)
    top = logprobs.topk(min(num_top, len(logprobs)))
    found = torch.cat([logprobs[token : token + 1], top.values, top.indices.double()]).tolist()
    count = len(top.indices)
    return TokenLogprobs(found[0], tuple(zip(map(int, found[1 + count :]), found[1 : 1 + count], strict=True)))
