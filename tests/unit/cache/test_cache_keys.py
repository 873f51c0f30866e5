"""Stored keys: every field counts, none runs into its neighbour, and the secret decides."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cache.domain.keys import KeyDeriver, KeyOwner, pack_fields
from services.cache.domain.values import EntryKind, Epochs, Namespace

OWNER = KeyOwner(Namespace("acme", "salt"), "model", Epochs(1, 2), "profile")
CONTENT = b"c" * 32
OTHER_OWNERS = {
    "tenant": replace(OWNER, namespace=Namespace("acmes", "salt")),
    "salt": replace(OWNER, namespace=Namespace("acme", "")),
    "boundary": replace(OWNER, namespace=Namespace("acmes", "alt")),
    "model": replace(OWNER, model="modem"),
    "tenant epoch": replace(OWNER, epochs=Epochs(2, 2)),
    "model epoch": replace(OWNER, epochs=Epochs(1, 1)),
    "swapped epochs": replace(OWNER, epochs=Epochs(2, 1)),
    "profile": replace(OWNER, profile_digest="profile2"),
}


def entry_key(owner: KeyOwner, kind: EntryKind = EntryKind.SEGMENT, content: bytes = CONTENT) -> bytes:
    return KeyDeriver(b"secret").entry_keys(owner).key(kind, content)


@pytest.mark.parametrize("field", list(OTHER_OWNERS))
def test_every_field_of_the_owner_enters_the_key(field: str) -> None:
    assert entry_key(OWNER) == entry_key(replace(OWNER))
    assert len(entry_key(OWNER)) == 32
    assert entry_key(OTHER_OWNERS[field]) != entry_key(OWNER)


def test_kind_and_content_enter_the_key_whatever_was_asked_before() -> None:
    keys = KeyDeriver(b"secret").entry_keys(OWNER)
    found = [keys.key(kind, content) for kind in EntryKind for content in (CONTENT, b"d" * 32)]
    assert len(set(found)) == 4
    assert keys.key(EntryKind.SEGMENT, CONTENT) == entry_key(OWNER)


def test_the_secret_enters_keys_and_scopes() -> None:
    one, other = KeyDeriver(b"secret one"), KeyDeriver(b"secret two")
    assert one.entry_keys(OWNER).key(EntryKind.SEGMENT, CONTENT) != other.entry_keys(OWNER).key(
        EntryKind.SEGMENT, CONTENT
    )
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
