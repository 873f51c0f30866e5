"""How fast tiers and the engine are, by moving averages, and whether a stored part is fetched or computed (design §7)."""

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["OTHER_HOST", "SAME_HOST", "FetchPolicy", "TierSpeed", "TokenSpeed"]

# The tiers of what another worker holds.
SAME_HOST, OTHER_HOST = "same_host", "other_host"

# The weight of what is new: about the last ten count.
_WEIGHT = 0.2
# Of passes more count, since a line needs several lengths; lengths are told apart that spread by so much of their mean.
_PASS_WEIGHT = 0.05
_LEAST_SPREAD = 0.25
# So many refusals in a row, then one fetch, lest a slow spell be remembered for ever.
_REFUSALS = 16


@dataclass(slots=True)
class TierSpeed:
    """latency_seconds: until a blob is open; bytes_per_second: behind that, into the engine's memory. None: not yet known."""

    latency_seconds: float | None = None
    bytes_per_second: float | None = None

    def observe(self, latency_seconds: float, seconds: float, num_bytes: int) -> None:
        """One fetch of `num_bytes` that took `seconds` behind its latency."""
        self.latency_seconds = _average(self.latency_seconds, latency_seconds)
        self.bytes_per_second = _average(self.bytes_per_second, num_bytes / max(seconds, 1e-9))

    def observe_timeout(self, seconds: float) -> None:
        """A fetch that had not come after so long, lest every prompt waits as long for a medium that hangs."""
        self.latency_seconds = _average(self.latency_seconds, seconds)

    def estimate(self, num_bytes: int) -> float | None:
        """Seconds of a fetch."""
        if self.latency_seconds is None:
            return None
        return self.latency_seconds + (num_bytes / self.bytes_per_second if self.bytes_per_second else 0.0)


@dataclass(slots=True)
class TokenSpeed:
    """What more tokens add to a pass: the slope of a line through what was seen, the latest counting most.

    A pass has a price of its own, on a GPU the reading of all weights, which tokens more do not pay again. Where passes so far
    do not tell the two apart, being of about one length or noisy, the whole is taken for the tokens' price.
    """

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0

    def observe(self, seconds: float, num_tokens: int) -> None:
        """One pass."""
        kept = 1.0 - _PASS_WEIGHT
        self._weight = kept * self._weight + 1.0
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + seconds
        self._squares = kept * self._squares + num_tokens * num_tokens
        self._products = kept * self._products + num_tokens * seconds

    @property
    def pass_seconds(self) -> float:
        """What a pass takes beside its tokens; 0 before that is known."""
        if not self._tokens:
            return 0.0
        return max(0.0, self._seconds / self._weight - (self.estimate(1) or 0.0) * self._tokens / self._weight)

    def estimate(self, num_tokens: int) -> float | None:
        """Seconds that so many tokens add."""
        if not self._tokens:
            return None
        mean = self._tokens / self._weight
        variance = self._squares / self._weight - mean * mean
        covariance = self._products / self._weight - mean * self._seconds / self._weight
        if variance < (_LEAST_SPREAD * mean) ** 2 or covariance <= 0:
            return num_tokens * self._seconds / self._tokens
        return num_tokens * covariance / variance


@dataclass(slots=True)
class FetchPolicy:
    """Fetch or compute. What is not known yet is fetched, and thereby measured.

    engine: what live tokens take in combines; captures: what a segment's tokens take in captures apart from prompts.
    """

    engine: TokenSpeed = field(default_factory=TokenSpeed)
    captures: TokenSpeed = field(default_factory=TokenSpeed)
    tiers: dict[str, TierSpeed] = field(default_factory=dict)
    _refused: dict[str, int] = field(default_factory=dict)

    def learn(self, combines: Iterable[tuple[float, int]], captures: Iterable[tuple[float, int]]) -> None:
        """Passes that have run before, as seconds and tokens."""
        for seconds, tokens in combines:
            self.engine.observe(seconds, tokens)
        for seconds, tokens in captures:
            self.captures.observe(seconds, tokens)

    def speed(self, tier: str) -> TierSpeed:
        """One tier's."""
        return self.tiers.setdefault(tier, TierSpeed())

    def quickest(self, sizes: dict[str, int]) -> str:
        """Of tiers that hold a blob, by bytes there; one that is not known yet comes first."""
        return min(sizes, key=lambda tier: self.speed(tier).estimate(sizes[tier]) or 0.0)

    def choose(self, sizes: dict[str, int], num_tokens: int) -> str | None:
        """The quickest of the tiers that hold a blob, by bytes there; None where computing its tokens is quicker."""
        tier = self.quickest(sizes)
        fetch, compute = self.speed(tier).estimate(sizes[tier]), self.engine.estimate(num_tokens)
        if fetch is None or compute is None or fetch <= compute:
            return tier
        refused = self._refused.get(tier, 0) + 1
        self._refused[tier] = refused % _REFUSALS
        return None if refused < _REFUSALS else tier


def _average(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
