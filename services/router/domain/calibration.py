"""What is known of the loss under the served profile: from calibration cards that workers have checked."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.router.domain.request import Refresh

__all__ = ["Calibration", "Card", "Estimate", "agreed", "with_refresh"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Card:
    """What a card says. date: RFC 3339 in UTC; prompts: the name of their file; prompts_digest: of its bytes.

    num_tokens: of a reply, that were compared; refresh_blocks: refreshed in every prompt; live_share: of document tokens,
    that ran through the model; divergences in nats a token; agreement: share of prompts.
    """

    digest: str
    date: str
    device: str
    prompts: str
    prompts_digest: str
    num_prompts: int
    num_tokens: int
    refresh_blocks: int
    live_share: float
    divergence: Estimate
    first_divergence: Estimate
    agreement: Estimate


@dataclass(frozen=True, slots=True)
class Calibration:
    """A card that holds, or the reason why none does."""

    card: Card | None = None
    refusal: str = "no worker is described"


def agreed(told: Iterable[Calibration]) -> Calibration:
    """What workers of one model and profile say together: the card that was measured last, else the first reason.

    A card speaks of the model and the profile, which are the same on all of them: one that has none yet takes nothing away.
    """
    found = list(told)
    cards = [each for each in found if each.card is not None]
    if cards:
        return max(cards, key=lambda each: ("", "") if each.card is None else (each.card.date, each.card.digest))
    return found[0] if found else Calibration()


def with_refresh(calibration: Calibration, refresh: Refresh) -> Calibration:
    """A card speaks of requests that refresh as many blocks as its prompts did."""
    card = calibration.card
    if card is None or refresh.blocks == card.refresh_blocks:
        return calibration
    served = "auto" if refresh.blocks is None else refresh.blocks
    return Calibration(
        refusal=f"the card was measured with {card.refresh_blocks} refreshed blocks a prompt, and HYPIC_ROUTER_REFRESH is"
        f" {served}; set it to {card.refresh_blocks}, or calibrate anew"
    )
