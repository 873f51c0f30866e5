"""Which requests begin from a composed state."""

from dataclasses import replace
from typing import Any

import pytest
from hypic_vllm.claims import Offer, OfferError, RequestFacts, claim, read_offer, salt_of

_HANDLE = bytes(range(32))
_OFFER = Offer(_HANDLE, "127.0.0.1:7102", 99)
_FACTS = RequestFacts(prompt_tokens=100, local_tokens=0, cache_salt=salt_of(_HANDLE), is_plain_text=True)
_WORKERS = ("10.0.0.*:7102", "127.0.0.1:*")


def test_all_tokens_but_the_last_are_claimed() -> None:
    assert claim(_OFFER, _FACTS, _WORKERS).num_tokens == 99


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(_FACTS, prompt_tokens=99), "99 tokens, the prompt has 99"),
        (replace(_FACTS, prompt_tokens=101), "the prompt has 101"),
        (replace(_FACTS, local_tokens=32), "own cache"),
        (replace(_FACTS, cache_salt=""), "cache_salt"),
        (replace(_FACTS, cache_salt=salt_of(bytes(32))), "cache_salt"),
        (replace(_FACTS, is_plain_text=False), "adapters"),
    ],
)
def test_whatever_else_is_computed_by_vllm(facts: RequestFacts, reason: str) -> None:
    with pytest.raises(OfferError, match=reason):
        claim(_OFFER, facts, _WORKERS)


@pytest.mark.parametrize("address", ["127.0.0.2:7102", "10.0.0.7:7103", "evil.example:7102", "127.0.0.1"])
def test_no_worker_is_asked_that_the_operator_does_not_name(address: str) -> None:
    with pytest.raises(OfferError, match="none of the workers"):
        claim(replace(_OFFER, address=address), _FACTS, _WORKERS)


def test_no_two_handles_share_a_salt_and_none_shows_its_handle() -> None:
    handles = [bytes([first]) + bytes(31) for first in range(200)]
    salts = {salt_of(handle) for handle in handles}
    assert len(salts) == len(handles)
    assert not any(handle.hex() in salt for handle, salt in zip(handles, salts, strict=True))


def test_requests_without_an_offer_are_plain() -> None:
    assert read_offer(None) is None
    assert read_offer({}) is None
    assert read_offer({"do_remote_prefill": True}) is None


def test_an_offer_is_read_as_it_was_written() -> None:
    fields = {"handle": _HANDLE.hex(), "address": "127.0.0.1:7102", "num_tokens": 99}
    assert read_offer({"hypic": fields}) == _OFFER


@pytest.mark.parametrize(
    "change",
    [
        {"handle": "zz"},
        {"handle": "00"},
        {"handle": None},
        {"address": 3},
        {"num_tokens": 0},
        {"num_tokens": True},
        {"num_tokens": "99"},
    ],
)
def test_malformed_offers_are_refused(change: dict[str, Any]) -> None:
    fields = {"handle": _HANDLE.hex(), "address": "127.0.0.1:7102", "num_tokens": 99} | change
    with pytest.raises(OfferError):
        read_offer({"hypic": fields})
    with pytest.raises(OfferError):
        read_offer({"hypic": "not even an object"})
