"""Pairs of replies, and an exact interval of what they differ by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, lgamma, log

__all__ = ["Flip", "Pair", "PairedResult", "compare_pairs", "paired_interval", "share_bounds"]

# Each of two intervals leaves out half of the 5 %, so that both hold together in 95 % of all runs.
_TAIL = 0.0125
_HALVINGS = 50


@dataclass(frozen=True, slots=True)
class Pair:
    """One question asked with `off` and with `compose`. off_right, compose_right: None where no answer is known.

    composed_tokens of prompt_tokens came from segment states in the second reply, captured for it or before.
    """

    id: str
    question: str
    off: str
    compose: str
    off_right: bool | None
    compose_right: bool | None
    composed_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Flip:
    """An answer that reuse changed. direction: broken, mended, or changed where both are right, wrong or not judged."""

    id: str
    question: str
    direction: str
    off: str
    compose: str


@dataclass(frozen=True, slots=True)
class PairedResult:
    """Shares and losses in percent and points; None where no question has answers.

    composed_share: of all prompt tokens, in percent; 0 means that nothing was reused, and the comparison says nothing.
    loss: right answers of `off` minus those of `compose`, over judged questions, with a 95 % interval, low and high.
    """

    questions: int
    judged: int
    changed: int
    broken: int
    mended: int
    off_right: float | None
    compose_right: float | None
    loss: float | None
    loss_low: float | None
    loss_high: float | None
    composed_share: float
    flips: tuple[Flip, ...]


def compare_pairs(pairs: Sequence[Pair]) -> PairedResult:
    """What reuse changed over some questions, at least one."""
    judged = [own for own in pairs if own.off_right is not None]
    broken, mended = (sum(_direction(own) == direction for own in judged) for direction in ("broken", "mended"))
    count = len(judged)
    low, high = paired_interval(broken, mended, count) if count else (None, None)
    return PairedResult(
        questions=len(pairs),
        judged=count,
        changed=sum(own.off != own.compose for own in pairs),
        broken=broken,
        mended=mended,
        off_right=100 * sum(own.off_right is True for own in judged) / count if count else None,
        compose_right=100 * sum(own.compose_right is True for own in judged) / count if count else None,
        loss=100 * (broken - mended) / count if count else None,
        loss_low=low,
        loss_high=high,
        composed_share=100 * sum(own.composed_tokens for own in pairs) / sum(own.prompt_tokens for own in pairs),
        flips=tuple(
            Flip(own.id, own.question, _direction(own), own.off, own.compose) for own in pairs if own.off != own.compose
        ),
    )


def _direction(pair: Pair) -> str:
    if pair.off_right and not pair.compose_right:
        return "broken"
    return "mended" if pair.compose_right and not pair.off_right else "changed"


def paired_interval(broken: int, mended: int, count: int) -> tuple[float, float]:
    """At least 95 % interval of the points lost: exact bounds of both shares (Clopper and Pearson, 1934), at 97.5 % each.

    Unlike a bootstrap it does not shrink to nothing where no answer flipped.
    """
    broken_low, broken_high = share_bounds(broken, count)
    mended_low, mended_high = share_bounds(mended, count)
    return 100 * (broken_low - mended_high), 100 * (broken_high - mended_low)


def share_bounds(hits: int, count: int) -> tuple[float, float]:
    """Exact 97.5 % bounds of a probability after `hits` of `count`."""
    low = 0.0 if hits == 0 else _solve(lambda share: 1 - _at_most(hits - 1, count, share) >= _TAIL)
    high = 1.0 if hits == count else _solve(lambda share: _at_most(hits, count, share) <= _TAIL)
    return low, high


def _at_most(hits: int, count: int, share: float) -> float:
    """The probability of no more than `hits` of `count`, 0 < share < 1."""
    ways = (lgamma(count + 1) - lgamma(own + 1) - lgamma(count - own + 1) for own in range(hits + 1))
    return sum(exp(way + own * log(share) + (count - own) * log(1 - share)) for own, way in enumerate(ways))


def _solve(holds: Callable[[float], bool]) -> float:
    """The least share from which on a condition holds."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (0.0, 1.0):
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
