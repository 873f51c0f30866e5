"""Receipts open for the worker and key that they were signed for, and for nothing else."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.cache.domain.receipts import ReceiptSigner
from services.cache.domain.values import EntryKind, EntryRecord, Epochs, Scopes

RECORD = EntryRecord(
    key=b"k" * 32,
    kind=EntryKind.SEGMENT,
    num_tokens=400,
    size_bytes=1 << 40,
    fence=1_800_000_000_000_001,
    ticket_id="nonce-1",
    scopes=Scopes("tenant:1", "model:2", frozenset({"document:3", "document:4"})),
    epochs=Epochs(1_700_000_000_000_003, 0),
    life="one life",
)
SIGNER = ReceiptSigner(b"secret")
RECEIPT = SIGNER.sign("w1", RECORD)


def test_a_receipt_gives_back_what_was_signed() -> None:
    assert SIGNER.open(RECEIPT, "w1", RECORD.key) == RECORD


def test_a_receipt_is_bound_to_worker_key_and_secret() -> None:
    assert SIGNER.open(RECEIPT, "w2", RECORD.key) is None
    assert SIGNER.open(RECEIPT, "w1", b"l" * 32) is None
    assert ReceiptSigner(b"another").open(RECEIPT, "w1", RECORD.key) is None


def test_equal_records_have_equal_receipts() -> None:
    assert SIGNER.sign("w1", replace(RECORD)) == RECEIPT


@given(st.integers(0, len(RECEIPT) - 1), st.integers(1, 255))
def test_no_altered_byte_survives(place: int, flip: int) -> None:
    altered = bytes([*RECEIPT[:place], RECEIPT[place] ^ flip, *RECEIPT[place + 1 :]])
    assert SIGNER.open(altered, "w1", RECORD.key) is None


@given(st.binary(max_size=200))
def test_arbitrary_bytes_open_nothing(receipt: bytes) -> None:
    assert SIGNER.open(receipt, "w1", RECORD.key) is None
