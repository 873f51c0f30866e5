"""How far a composed prompt's reply is from that of a full recompute, by what workers tell of each token."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.router.domain.shown_tokens import ShownToken

__all__ = ["Comparison", "compare", "divergence_bound"]

# In place of a probability of 0, which only rounding gives.
_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class Comparison:
    """divergence: of the first token, in nats, a lower bound; agreement: the share of greedy tokens that are alike from the first
    one on.
    """

    divergence: float
    agreement: float


def compare(full: Sequence[ShownToken], composed: Sequence[ShownToken]) -> Comparison:
    """The first greedy tokens of one prompt, computed in full and composed, with their likeliest alternatives.

    Raises:
        ValueError: one of them has no token.
    """
    if not full or not composed:
        raise ValueError("there is no token to compare")
    alike = 0
    for one, other in zip(full, composed, strict=False):
        if one.content != other.content:
            break
        alike += 1
    return Comparison(divergence_bound(_known(full[0]), _known(composed[0])), alike / max(len(full), len(composed)))


def _known(token: ShownToken) -> Mapping[bytes, float]:
    """Probabilities by what tokens spell; those that spell the same count together."""
    known: dict[bytes, float] = {}
    for content, logprob in token.top:
        known[content] = known.get(content, 0.0) + math.exp(logprob)
    return known


def divergence_bound(full: Mapping[bytes, float], composed: Mapping[bytes, float]) -> float:
    """At least so many nats is KL(full ‖ composed), whatever the tokens that are not told; both mappings hold the likeliest.

    The vocabulary falls into each token that both tell, those that `full` alone tells, and the rest. Joining tokens makes no
    divergence larger (data processing). How much of `composed` lies on the second kind is not told: no more than its least
    likely told token for each of them, and within that whatever makes the divergence smallest.
    """
    shared = full.keys() & composed.keys()
    alone = full.keys() - shared
    on_shared = sum(_term(full[token], composed[token]) for token in shared)
    full_alone = sum(full[token] for token in alone)
    full_rest = max(0.0, 1.0 - sum(full[token] for token in shared) - full_alone)
    composed_outside = max(0.0, 1.0 - sum(composed[token] for token in shared))
    most_alone = min(len(alone) * min(composed.values(), default=1.0), max(0.0, 1.0 - sum(composed.values())))
    outside = full_alone + full_rest
    composed_alone = min(most_alone, composed_outside * full_alone / outside) if outside else 0.0
    bound = on_shared + _term(full_alone, composed_alone) + _term(full_rest, composed_outside - composed_alone)
    return max(0.0, bound)


def _term(full: float, composed: float) -> float:
    return full * math.log(full / max(composed, _LEAST)) if full > _LEAST else 0.0
