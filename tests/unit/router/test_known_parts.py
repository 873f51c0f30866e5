"""The memo of parts: what it gives back is what would be made anew, and it keeps within its bytes."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.common.content import content_hash
from services.router.domain.assembly import Assembler
from services.router.domain.known_parts import KnownParts
from services.router.domain.parts import Part, PartKind
from services.router.domain.request import ChatPrompt, Content, Document, Message, Role, Text
from tests.unit.router.test_assembly import LONG, PROFILE, assembler

ENTRY_BYTES = 2_000
TEXTS = st.sampled_from(["", "short", LONG, f"{LONG} and of the town", "the bridge of the harbour, in winter " * 3])
CONTENTS = st.one_of(
    st.builds(Text, TEXTS, st.booleans(), st.booleans()),
    st.builds(Document, TEXTS, st.sampled_from(["", "Bridges"]), st.sampled_from(["", "one", "two"]), st.booleans()),
)


def forgetful() -> Assembler:
    return replace(assembler(), known=KnownParts(0))


@given(st.lists(st.lists(CONTENTS, min_size=1, max_size=3), min_size=1, max_size=4))
def test_parts_that_are_known_are_those_that_would_be_made(turns: list[list[Content]]) -> None:
    prompt = ChatPrompt((*(Message(Role.USER, tuple(turn)) for turn in turns), Message(Role.USER, (Text("why?"),))))
    remembering = assembler()
    first = remembering.assemble(prompt)
    assert first == remembering.assemble(prompt) == forgetful().assemble(prompt)


def test_a_known_segment_brings_the_hash_that_its_ids_have() -> None:
    part = assembler().document_part(Document(LONG, "Bridges", "one"))
    assert part.kind is PartKind.SEGMENT
    assert part.content_hash == content_hash(PROFILE.digest, part.token_ids)
    assert assembler().document_part(Document(LONG, "Bridges", "one")) is part


def text(name: str) -> Text:
    return Text(name * 600)


def part(num_tokens: int = 100) -> Part:
    return Part(PartKind.SEGMENT, tuple(range(num_tokens)))


def test_the_memo_is_bounded_in_bytes_and_drops_the_least_recently_used() -> None:
    memo = KnownParts(3 * ENTRY_BYTES)
    for name in "abc":
        memo.put(text(name), part())
    assert memo.get(text("a")) == part()
    memo.put(text("d"), part())
    assert memo.get(text("b")) is None
    assert memo.get(text("a")) is not None
    assert 3 * ENTRY_BYTES >= memo.used_bytes > 2 * ENTRY_BYTES
    memo.put(text("e"), part(10_000))
    assert memo.get(text("e")) is None
    assert text("e") not in memo


def test_looking_whether_a_part_is_known_does_not_keep_it() -> None:
    memo = KnownParts(2 * ENTRY_BYTES)
    memo.put(text("a"), part())
    memo.put(text("b"), part())
    assert text("a") in memo
    memo.put(text("c"), part())
    assert text("a") not in memo


def test_short_texts_are_not_kept() -> None:
    memo = KnownParts(1 << 20)
    memo.put(Text("why?"), part())
    assert Text("why?") not in memo
    assert memo.used_bytes == 0
