"""Another engine that writes replies, from a decode state that a worker holds or from the prompt's ids alone."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Protocol

from blake3 import blake3

from services.router.domain.parts import Reason
from services.router.domain.ports import (
    DecodedBy,
    Finished,
    GenerateOrder,
    PartOrder,
    PartServing,
    Prefilled,
    ServedPart,
    Tokens,
)
from services.router.domain.request import Sampling

__all__ = [
    "DecodeOrder",
    "DecodingEngine",
    "StateOffer",
    "computed_by",
    "cut_last_token",
    "salt_of",
    "with_last_token",
]


def salt_of(handle: bytes) -> str:
    """The `cache_salt` of a composed prompt: a handle serves once, so that no two compositions share a salt."""
    return f"hypic-{blake3(handle).hexdigest()}"


@dataclass(frozen=True, slots=True)
class StateOffer:
    """A decode state of the prompt's first tokens, and the worker that gives it."""

    handle: bytes
    address: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """A prompt for another engine; `sampling.max_tokens` is set."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    offer: StateOffer | None = None


class DecodingEngine(Protocol):
    """An engine. Closing an iterator cancels the work behind it; every call raises a `HypicError` when it fails."""

    name: str

    def decode(self, order: DecodeOrder, timeout_seconds: float) -> AsyncGenerator[Tokens | Finished]:
        """The reply; a stop token ends it and is no part of it."""
        ...


def cut_last_token(order: GenerateOrder) -> GenerateOrder | None:
    """The order whose decode state an engine goes on from: it runs the last token itself, to draw the first of the reply.

    None where nothing would be left of the last part.
    """
    last = order.parts[-1]
    if len(last.token_ids) < 2:
        return None
    cut = replace(last, token_ids=last.token_ids[:-1])
    return replace(order, parts=(*order.parts[:-1], cut), sampling=Sampling(temperature=0.0, max_tokens=1))


def with_last_token(prefilled: Prefilled, decoded_by: DecodedBy) -> Prefilled:
    """What a worker says of the cut prompt as the whole one's: the engine has computed the last token."""
    last = prefilled.parts[-1]
    whole = replace(last, live_tokens=last.live_tokens + 1)
    return replace(prefilled, parts=(*prefilled.parts[:-1], whole), decoded_by=decoded_by)


def computed_by(order: GenerateOrder, decoded_by: DecodedBy) -> Prefilled:
    """An engine has computed the whole prompt itself."""
    return Prefilled(tuple(map(_computed, order.parts)), 0.0, 0.0, 0.0, decoded_by)


def _computed(part: PartOrder) -> ServedPart:
    was_to_be_reused = part.serving is not PartServing.LIVE
    reason = Reason.STATE_NOT_LOADED.value if was_to_be_reused else ""
    return ServedPart(PartServing.LIVE, len(part.token_ids), 0, "", reason)
