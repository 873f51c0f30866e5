"""Which setting a deployment is to serve: pure functions over what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from eval.settings import Setting
from eval.statistics import Interval

__all__ = ["CUT_LOSSES", "Keep", "Measured", "MostLive", "MostLoss", "Rule", "choose", "choose_encoding", "front"]

# A prompt counts with so many losses at most where the upper end of a mean is looked for, as in the router's guard.
CUT_LOSSES = 12


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting on all prompts. kl, first_kl: nats a token; agreement: share of prompts; seconds: None where not predicted.

    live_share: of document tokens, 0 to 1; prompts: how many were asked.
    """

    setting: Setting
    live_share: float
    kl: Interval
    first_kl: Interval
    agreement: Interval
    seconds: float | None = None
    prompts: int = 1

    @property
    def cost(self) -> float:
        """What is to be kept low: predicted time, else live tokens."""
        return self.live_share if self.seconds is None else self.seconds


@dataclass(frozen=True, slots=True)
class MostLoss:
    """The cheapest setting whose mean divergence lies below `nats` with the upper end of its interval."""

    nats: float

    def __str__(self) -> str:
        return f"the cheapest setting whose mean KL lies below {self.nats:g} nats a token with the upper end of its interval"


@dataclass(frozen=True, slots=True)
class MostLive:
    """The setting of least mean divergence among those with no more than `share` of document tokens live."""

    share: float

    def __str__(self) -> str:
        return f"the setting of least mean KL with at most {100 * self.share:g} % of document tokens live"


@dataclass(frozen=True, slots=True)
class Keep:
    """What is served already."""

    def __str__(self) -> str:
        return "the profile as it is served"


Rule = MostLoss | MostLive | Keep


def front(measured: Sequence[Measured]) -> list[Measured]:
    """The settings that no other one betters in divergence at no more cost, or in cost at no more divergence, by cost.

    Of equals in both, the first.
    """
    found: list[Measured] = []
    # Sorting is stable, so that of equals the first comes first.
    for own in sorted(measured, key=lambda each: (each.cost, each.kl.value)):
        if not found or own.kl.value < found[-1].kl.value:
            found.append(own)
    return found


def choose(measured: Sequence[Measured], rule: Rule) -> Measured | None:
    """By the rule; of equals the first. None where no setting meets it. `measured` begins with what is served."""
    match rule:
        case Keep():
            return measured[0]
        case MostLoss(nats):
            within = [own for own in measured if own.kl.high < nats]
            return min(within, key=lambda own: (own.cost, own.kl.value), default=None)
        case MostLive(share):
            within = [own for own in measured if own.live_share <= share]
            return min(within, key=lambda own: (own.kl.value, own.cost), default=None)


def choose_encoding(measured: Sequence[Measured], sizes: Sequence[int], rule: Rule) -> Measured:
    """Of one setting under several encodings, the one of fewest bytes that keeps to the rule; the first where it decides nothing.

    Only a bound on the divergence says how much of it bytes are worth.
    """
    if not isinstance(rule, MostLoss):
        return measured[0]
    within = [(size, own) for size, own in zip(sizes, measured, strict=True) if own.kl.high < rule.nats]
    return min(within, key=lambda pair: pair[0], default=(0, measured[0]))[1]
