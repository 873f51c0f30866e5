"""Stored keys: every field counts, none runs into its neighbour, and the secret decides."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cache.domain.keys import KeyDeriver, KeySubject, pack_fields
from services.cache.domain.values import EntryKind, Epochs, Namespace

SUBJECT = KeySubject(Namespace("acme", "salt"), "model", Epochs(1, 2), "profile", EntryKind.SEGMENT, b"c" * 32)
OTHERS = {
    "tenant": replace(SUBJECT, namespace=Namespace("acmes", "salt")),
    "salt": replace(SUBJECT, namespace=Namespace("acme", "")),
    "boundary": replace(SUBJECT, namespace=Namespace("acmes", "alt")),
    "model": replace(SUBJECT, model="modem"),
    "tenant epoch": replace(SUBJECT, epochs=Epochs(2, 2)),
    "model epoch": replace(SUBJECT, epochs=Epochs(1, 1)),
    "swapped epochs": replace(SUBJECT, epochs=Epochs(2, 1)),
    "profile": replace(SUBJECT, profile_digest="profile2"),
    "kind": replace(SUBJECT, kind=EntryKind.PREFIX),
    "content": replace(SUBJECT, content_hash=b"d" * 32),
}


@pytest.mark.parametrize("field", list(OTHERS))
def test_every_field_enters_the_key(field: str) -> None:
    keys = KeyDeriver(b"secret")
    assert keys.entry_key(SUBJECT) == keys.entry_key(replace(SUBJECT))
    assert len(keys.entry_key(SUBJECT)) == 32
    assert keys.entry_key(OTHERS[field]) != keys.entry_key(SUBJECT)


def test_the_secret_enters_keys_and_scopes() -> None:
    one, other = KeyDeriver(b"secret one"), KeyDeriver(b"secret two")
    assert one.entry_key(SUBJECT) != other.entry_key(SUBJECT)
    assert one.tenant_scope("acme") != other.tenant_scope("acme")


FIELDS = st.lists(st.binary(max_size=9), max_size=4)


@given(FIELDS, FIELDS)
def test_packed_fields_are_equal_only_for_equal_fields(left: list[bytes], right: list[bytes]) -> None:
    assert (pack_fields(*left) == pack_fields(*right)) == (left == right)


def test_moving_a_byte_between_fields_changes_the_packing() -> None:
    assert pack_fields(b"ab", b"c") != pack_fields(b"a", b"bc")
    assert pack_fields(b"", b"a") != pack_fields(b"a", b"")


def test_scopes_of_different_things_never_meet_and_hide_their_names() -> None:
    keys = KeyDeriver(b"secret")
    scopes = [
        keys.tenant_scope("x"),
        keys.model_scope("x"),
        keys.document_scope("x", "x"),
        keys.document_scope("xx", ""),
        keys.document_scope("", "xx"),
        keys.document_scope("acme", "annual report"),
    ]
    assert len(set(scopes)) == len(scopes)
    assert not any("acme" in scope or "report" in scope for scope in scopes)
