"""Token sampling: greedy, or temperature with min-p, top-k and nucleus filters, reproducible by seed."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from services.worker.engine.grammar import TokenGrammar

__all__ = [
    "Likeliest",
    "LogitEdits",
    "Sampler",
    "SamplingOptions",
    "find_likeliest",
    "pick_likeliest",
    "read_likeliest",
]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """temperature 0 is greedy; top_k 0 keeps all; seed None draws one.

    min_p: of the likeliest token's probability; logit_bias: token and what is added to its logit; min_tokens: so many are drawn
    before one of stop_ids may be; logprobs: how many alternatives are told with each token's own, None tells nothing.

    Raises:
        ValueError: a value is out of its range.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError("max_tokens must be at least 1, and min_tokens must lie between 0 and max_tokens")
        if not self.temperature >= 0.0 or not 0.0 < self.top_p <= 1.0 or self.top_k < 0:
            raise ValueError("temperature and top_k must not be negative, top_p must lie in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0 or not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError("min_p must lie in [0, 1], repetition_penalty must be positive and finite")
        added = (self.presence_penalty, self.frequency_penalty, *(bias for _, bias in self.logit_bias))
        if not all(map(math.isfinite, added)):
            raise ValueError("penalties and biases must be finite")
        if len({token for token, _ in self.logit_bias}) != len(self.logit_bias):
            raise ValueError("logit_bias must name a token once")
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError("logprobs must not be negative")


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


class LogitEdits:
    """What a request asks to change in its logits ahead of a draw: its grammar, stop tokens held off, biases, penalties.

    In vLLM's order and with its definitions: the repetition penalty counts the prompt too, the others only the reply. Holds
    what has been seen and drawn, all of it this request's own, and on the CPU.
    """

    def __init__(
        self, options: SamplingOptions, prompt_ids: Iterable[int] = (), grammar: TokenGrammar | None = None
    ) -> None:
        self._options = options
        self._grammar = grammar
        self._num_drawn = 0
        self._is_counting = any((options.presence_penalty, options.frequency_penalty, options.repetition_penalty != 1))
        self._seen_ids = list(dict.fromkeys(prompt_ids)) if options.repetition_penalty != 1 else []
        self._seen = self._counts = torch.empty(0)
        self._biased = torch.tensor([token for token, _ in options.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in options.logit_bias], dtype=torch.float64)
        self._stops = torch.tensor(sorted(options.stop_ids), dtype=torch.int64)

    @property
    def changes(self) -> bool:
        """The next token's logits may not stay as they are."""
        return self._is_counting or bool(self._options.logit_bias) or self._holds_off or self._grammar is not None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The changed logits, from fp64 ones `[vocabulary]` on the CPU, which may be overwritten.

        Raises:
            ValueError: the grammar cannot be followed.
        """
        if self._grammar is not None:
            logits.masked_fill_(~self._grammar.allowed(), float("-inf"))
        if self._holds_off:
            logits[self._stops] = float("-inf")
        logits[self._biased] += self._bias
        if not self._is_counting:
            return logits
        self._begin_counting(logits.shape[-1])
        repetition = self._options.repetition_penalty
        damped = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self._seen, damped, logits)
        logits -= self._options.frequency_penalty * self._counts
        logits -= self._options.presence_penalty * (self._counts > 0)
        return logits

    def note(self, token: int) -> None:
        """A token has been drawn from what `apply` gave last."""
        self._num_drawn += 1
        if self._grammar is not None:
            self._grammar.accept(token)
        if self._is_counting:
            self._seen[token] = True
            self._counts[token] += 1

    @property
    def _holds_off(self) -> bool:
        return self._num_drawn < self._options.min_tokens

    def _begin_counting(self, vocabulary: int) -> None:
        if len(self._counts) == vocabulary:
            return
        self._counts = torch.zeros(vocabulary, dtype=torch.float64)
        self._seen = torch.zeros(vocabulary, dtype=torch.bool)
        self._seen[self._seen_ids] = True


class Sampler:
    """Draws one request's tokens. The same seed and logits give the same tokens, whatever else is in the batch."""

    def __init__(
        self, options: SamplingOptions, prompt_ids: Iterable[int] = (), grammar: TokenGrammar | None = None
    ) -> None:
        self._options = options
        self._edits = LogitEdits(options, prompt_ids, grammar)
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    def draw(self, logits: torch.Tensor, likeliest: Likeliest) -> int:
        """A token from fp32 logits `[vocabulary]`, whose largest is known; they stay as they are.

        Raises:
            ValueError: a logit is no number, the largest is infinite, no token is left to be drawn, or the grammar cannot be
                followed.
        """
        if not math.isfinite(likeliest.logit):
            raise ValueError("the model's logits are not finite; its weights or dtype cannot represent this prompt")
        is_plain = self._options.temperature == 0.0 and not self._edits.changes
        token = likeliest.token if is_plain else self._draw(logits)
        self._edits.note(token)
        return token

    def _draw(self, logits: torch.Tensor) -> int:
        # The generator lives on the CPU, so that a seed means the same on every device. A copy: edits overwrite it.
        wide = self._edits.apply(logits.cpu().to(torch.float64, copy=True))
        if not math.isfinite(largest := float(wide.max())):
            raise ValueError("no token is left to be drawn; ask for less min_tokens or logit_bias")
        if self._options.temperature == 0.0:
            return int(wide.argmax())
        # A difference of zero survives every temperature; a large logit over a tiny one would overflow.
        scaled = (wide - largest) / self._options.temperature
        weights = self._nucleus(self._top_k(self._min_p(scaled)).softmax(-1))
        return self._pick(weights.cumsum(-1))

    def _pick(self, cumulative: torch.Tensor) -> int:
        """By one random number, where `torch.multinomial` draws one for every token of the vocabulary."""
        total = cumulative[-1:]
        point = torch.rand(1, dtype=torch.float64, generator=self._generator) * total
        # Right of equals: a token without weight is never met. The product may round up to the total, which the last one has.
        token = torch.searchsorted(cumulative, point, right=True)
        return int(token if token < len(cumulative) else torch.searchsorted(cumulative, total))

    def _min_p(self, scaled: torch.Tensor) -> torch.Tensor:
        """Keeps tokens of at least min_p of the likeliest one's probability, whose logit is 0."""
        if not self._options.min_p:
            return scaled
        return scaled.masked_fill(scaled < math.log(self._options.min_p), float("-inf"))

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


# From options, the prompt's tokens and the reply's grammar.
CreateSampler = Callable[[SamplingOptions, Iterable[int], TokenGrammar | None], Sampler]
