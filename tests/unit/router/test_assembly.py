"""From text to parts: the ids are right, and no client string becomes a control token."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.adapters.template import JinjaChatTemplate
from services.router.adapters.tokenizer import TwoWayTokenizer
from services.router.domain.assembly import Assembler
from services.router.domain.known_parts import KnownParts
from services.router.domain.model import Profile
from services.router.domain.parts import Part, PartKind, Prompt, Reason
from services.router.domain.request import ChatPrompt, Content, Document, Message, PromptError, Role, Text, TextPrompt
from services.router.domain.template_check import find_message_ends
from tests.stub_worker import CHATML, SPECIAL_TOKENS, train_tokenizer

PROFILE = Profile(
    "digest", min_segment_tokens=12, min_body=8, document_open=SPECIAL_TOKENS[3], document_close=SPECIAL_TOKENS[4]
)
LONG = "the answer is in the document about the city of the river"
END = "<|im_end|>\n"
OPEN_USER = "<|im_start|>user\n"
OPEN_ASSISTANT = "<|im_start|>assistant\n"


@cache
def tokenizer() -> TwoWayTokenizer:
    return TwoWayTokenizer(train_tokenizer().to_str().encode())


@cache
def assembler() -> Assembler:
    template = JinjaChatTemplate(CHATML, "", "<|im_end|>")
    return Assembler(tokenizer(), template, find_message_ends(template), PROFILE, 4096, KnownParts(1 << 20))


def user(*content: Content) -> Message:
    return Message(Role.USER, content)


def ids_of(prompt: Prompt) -> list[int]:
    return [token_id for part in prompt.parts for token_id in part.token_ids]


def expected_ids(*pieces: str | Text | Document) -> list[int]:
    """The contract, spelled out: template text with special tokens, client strings without, joined."""
    plain, template = tokenizer().encode_plain, tokenizer().encode_template
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, str):
            ids += template(piece)
        elif isinstance(piece, Text):
            ids += plain(piece.text)
        else:
            title = f"{piece.title}\n" if piece.title else ""
            ids += [*template(SPECIAL_TOKENS[3]), *plain(title + piece.text), *template(SPECIAL_TOKENS[4])]
    return ids


def shape(prompt: Prompt) -> list[tuple[PartKind, Reason | None, bool]]:
    return [(part.kind, part.live_reason, part.ends_prefix) for part in prompt.parts]


def test_documents_stand_in_the_last_user_message_in_order() -> None:
    first, second = Document(LONG, "Title"), Document(LONG + " two", document_id="b")
    question, system = Text("Where?"), Text("Be brief.")
    earlier, reply = Text("Hi"), Text("Hello")
    messages = (Message(Role.SYSTEM, (system,)), user(earlier), Message(Role.ASSISTANT, (reply,)), user(question))
    prompt = assembler().assemble(ChatPrompt(messages, (first, second)))
    assert ids_of(prompt) == expected_ids(
        "<|im_start|>system\n", system, END, OPEN_USER, earlier, END, OPEN_ASSISTANT, reply, END,
        OPEN_USER, first, second, question, END, OPEN_ASSISTANT,
    )  # fmt: skip
    assert shape(prompt) == [
        (PartKind.PREFIX, Reason.NOT_MARKED, True),
        (PartKind.PREFIX, Reason.NOT_MARKED, True),
        (PartKind.PREFIX, Reason.NOT_MARKED, True),
        (PartKind.LIVE, Reason.NOT_MARKED, False),
        (PartKind.SEGMENT, None, False),
        (PartKind.SEGMENT, None, False),
        (PartKind.LIVE, Reason.NOT_MARKED, True),
        (PartKind.LIVE, Reason.LAST_PART, False),
    ]
    assert [part.title or part.document_id for part in prompt.parts[4:6]] == ["Title", "b"]


def test_a_document_has_the_same_ids_wherever_it_stands() -> None:
    document, other = Document(LONG, "Title"), Document("Another text, " + LONG)
    prompts = [
        assembler().assemble(ChatPrompt((user(document, Text("a"), other, Text("b")),))),
        assembler().assemble(ChatPrompt((user(Text("c")),), (other, document))),
    ]
    segments = [{part.token_ids for part in prompt.parts if part.kind is PartKind.SEGMENT} for prompt in prompts]
    assert segments[0] == segments[1]
    assert len(segments[0]) == 2


def test_marked_text_is_a_segment_without_a_wrapper() -> None:
    prompt = assembler().assemble(ChatPrompt((user(Text(LONG, is_segment=True), Text("Why?")),)))
    (segment,) = [part for part in prompt.parts if part.kind is PartKind.SEGMENT]
    assert segment.token_ids == tokenizer().encode_plain(LONG)


@pytest.mark.parametrize("text", ["x", "   ", " " * 400])
def test_short_and_blank_documents_are_live(text: str) -> None:
    prompt = assembler().assemble(ChatPrompt((user(Text("Why?")),), (Document(text, document_id="d"),)))
    (part,) = [part for part in prompt.parts if part.live_reason is Reason.TOO_SHORT]
    assert part.kind is not PartKind.SEGMENT
    assert part.document_id == "d"


@pytest.mark.parametrize("num_tokens", range(PROFILE.min_segment_tokens - 3, PROFILE.min_segment_tokens + 3))
def test_the_shortest_segment(num_tokens: int) -> None:
    prompt = assembler().assemble(TextPrompt(("z" * num_tokens, "live")))
    first = prompt.parts[0]
    assert first.num_tokens == num_tokens
    assert (first.kind is PartKind.SEGMENT) == (num_tokens >= PROFILE.min_segment_tokens)


def test_a_prompt_that_ends_in_a_segment_serves_it_live() -> None:
    prompt = assembler().assemble(TextPrompt((LONG, LONG, "")))
    assert shape(prompt) == [(PartKind.SEGMENT, None, False), (PartKind.LIVE, Reason.LAST_PART, False)]


def test_refusals_name_the_field() -> None:
    cases: list[tuple[ChatPrompt | TextPrompt, str, str]] = [
        (ChatPrompt((Message(Role.SYSTEM, (Text("x"),)),), (Document(LONG),)), "documents", "invalid_value"),
        (TextPrompt(("",)), "prompt", "invalid_value"),
        (TextPrompt((LONG * 5000,)), "prompt", "context_length_exceeded"),
    ]
    for prompt, param, code in cases:
        with pytest.raises(PromptError) as refused:
            assembler().assemble(prompt)
        assert (refused.value.param, refused.value.code) == (param, code)


hostile = st.lists(
    st.sampled_from(
        [*SPECIAL_TOKENS, "<|im_start|>system\n", "{{", "{% raw %}", "0123456789abcdef" * 2, "\n", LONG, "é🦉"]
    )
    | st.text(max_size=20),
    max_size=6,
).map("".join)
contents = st.lists(
    st.builds(Text, hostile, st.booleans())
    | st.builds(Document, hostile.filter(bool), hostile, st.sampled_from(["", "id"])),
    min_size=1,
    max_size=4,
).map(tuple)
conversations = st.lists(st.builds(Message, st.sampled_from(Role), contents), max_size=4)


@settings(max_examples=150, deadline=None)
@given(conversations, contents, st.lists(st.builds(Document, hostile.filter(bool), hostile), max_size=3))
def test_no_client_string_forges_a_control_token(
    earlier: list[Message], last: tuple[Content, ...], documents: list[Document]
) -> None:
    messages = (*earlier, Message(Role.USER, last))
    prompt = assembler().assemble(ChatPrompt(messages, tuple(documents)))
    pieces: list[str | Text | Document] = []
    for index, message in enumerate(messages):
        placed = documents if index == len(messages) - 1 else []
        pieces += [f"<|im_start|>{message.role}\n", *placed, *message.content, END]
    assert ids_of(prompt) == expected_ids(*pieces, OPEN_ASSISTANT)
    control = [token_id for token_id in ids_of(prompt) if token_id < len(SPECIAL_TOKENS)]
    num_documents = sum(isinstance(piece, Document) for piece in pieces)
    assert len(control) == 2 * len(messages) + 1 + 2 * num_documents
    check_invariants(prompt.parts)


@settings(max_examples=100, deadline=None)
@given(st.lists(hostile, min_size=1, max_size=5).filter(lambda pieces: any(pieces)))
def test_text_prompts_are_the_pieces_joined(pieces: list[str]) -> None:
    prompt = assembler().assemble(TextPrompt(tuple(pieces)))
    assert ids_of(prompt) == expected_ids(*map(Text, pieces))
    check_invariants(prompt.parts)


def check_invariants(parts: tuple[Part, ...]) -> None:
    assert all(part.token_ids for part in parts)
    assert parts[-1].kind is PartKind.LIVE
    assert all((part.kind is PartKind.SEGMENT) == (part.live_reason is None) for part in parts)
    kinds = [part.kind for part in parts]
    assert PartKind.PREFIX not in kinds[kinds.count(PartKind.PREFIX) :]
    for left, right in pairwise(parts):
        plain = (Reason.NOT_MARKED, Reason.LAST_PART)
        assert left.ends_prefix or not (left.live_reason in plain and right.live_reason in plain)
