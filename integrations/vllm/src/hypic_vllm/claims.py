"""Which requests begin from a composed state, decided from the request alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from blake3 import blake3

__all__ = ["Claim", "Offer", "OfferError", "RequestFacts", "claim", "read_offer", "salt_of"]

_FIELD = "hypic"
_HANDLE_BYTES = 32


class OfferError(ValueError):
    """The request begins from no composed state; the message says why. vLLM computes its prompt."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A decode state that waits: its handle, the worker that holds it, and of how many leading tokens of the prompt it is."""

    handle: bytes
    address: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a claim depends on. local_tokens: found in vLLM's own prefix cache; is_plain_text: token ids, no adapter."""

    prompt_tokens: int
    local_tokens: int
    cache_salt: str
    is_plain_text: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """num_tokens: leading tokens of the prompt that are loaded."""

    offer: Offer
    num_tokens: int


def salt_of(handle: bytes) -> str:
    """The only `cache_salt` under which a state is loaded: a handle serves once, so no two compositions share a salt."""
    return f"hypic-{blake3(handle).hexdigest()}"


def read_offer(params: Mapping[str, Any] | None) -> Offer | None:
    """The offer in a request's `kv_transfer_params`; None where there is none.

    Raises:
        OfferError: it is malformed.
    """
    fields = (params or {}).get(_FIELD)
    if fields is None:
        return None
    try:
        handle, address, num_tokens = bytes.fromhex(fields["handle"]), fields["address"], fields["num_tokens"]
    except (KeyError, TypeError, ValueError) as error:
        raise OfferError(f"kv_transfer_params.{_FIELD} is malformed: {error!r}") from error
    if len(handle) != _HANDLE_BYTES or not isinstance(address, str) or type(num_tokens) is not int or num_tokens < 1:
        raise OfferError(f"kv_transfer_params.{_FIELD}: handle, address or num_tokens is out of range")
    return Offer(handle, address, num_tokens)


def claim(offer: Offer, facts: RequestFacts, allowed_workers: tuple[str, ...]) -> Claim:
    """All tokens of the prompt but the last, which vLLM runs itself to draw the first one of the reply.

    Raises:
        OfferError: the state must not be used for this request.
    """
    if offer.num_tokens != facts.prompt_tokens - 1:
        raise OfferError(f"the state is of {offer.num_tokens} tokens, the prompt has {facts.prompt_tokens}")
    if facts.local_tokens:
        raise OfferError(f"{facts.local_tokens} tokens lie in vLLM's own cache, in blocks that others may read")
    if facts.cache_salt != salt_of(offer.handle):
        raise OfferError(
            "cache_salt is not the one of this handle: composed blocks could be reached from other requests"
        )
    if not facts.is_plain_text:
        raise OfferError("the prompt has adapters, embeddings or media, of which the state knows nothing")
    if not any(fnmatchcase(offer.address, pattern) for pattern in allowed_workers):
        raise OfferError(f"{offer.address} is none of the workers that the connector may ask")
    return Claim(offer, offer.num_tokens)
