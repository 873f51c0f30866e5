"""What a next turn will send of a reply, and the place in its prompt behind just these tokens."""

import pytest

from services.router.domain.entries import EntryKind
from services.router.domain.model import Profile
from services.router.domain.parts import DocumentRef, Part, PartKind, Prompt, Reason
from services.router.domain.request import ChatPrompt, Message, Reuse, Role, Text
from services.router.domain.tools import Tool
from services.router.domain.turn import next_turn, turn_entry, watch_entry

PROFILE = Profile("digest", min_segment_tokens=12, min_body=8, document_open="", document_close="")
SYSTEM = Part(PartKind.PREFIX, tuple(range(20)), Reason.NOT_MARKED, ends_prefix=True)
SEGMENT = Part(PartKind.SEGMENT, tuple(range(100, 140)), document_id="a", document_digest=b"1")
QUESTION = Part(PartKind.LIVE, (4, 5, 6), Reason.NOT_MARKED, ends_prefix=True)
REPLY = Part(PartKind.LIVE, (7, 8, 9, 10), Reason.NOT_MARKED, ends_prefix=True)
FOLLOWING = Part(PartKind.LIVE, (11, 12), Reason.NOT_MARKED, ends_prefix=True)
LAST = Part(PartKind.LIVE, (13,), Reason.LAST_PART)
PROMPT = Prompt((SYSTEM, SEGMENT, QUESTION, REPLY, FOLLOWING, LAST))
IDS = tuple(token for part in PROMPT.parts[:4] for token in part.token_ids)
ASKED = ChatPrompt((Message(Role.USER, (Text("Well?"),)),))
TOOL = Tool("weather", '{"type": "function", "function": {"name": "weather"}}')


def test_it_stands_behind_just_these_tokens() -> None:
    entry = turn_entry(PROMPT, IDS, PROFILE, Reuse.COMPOSE)
    assert entry is not None
    assert (entry.kind, entry.num_tokens, entry.after_part) == (EntryKind.PREFIX, len(IDS), 4)
    assert entry.documents == (DocumentRef("a", b"1"),)
    assert entry.is_composed
    exact = turn_entry(PROMPT, IDS, PROFILE, Reuse.EXACT)
    assert exact is not None
    assert not exact.is_composed
    assert exact.content_hash != entry.content_hash


@pytest.mark.parametrize("ids", [IDS[:-1], (*IDS, 11), (*IDS[:-1], 0), (99, *IDS[1:])])
def test_other_tokens_have_no_place(ids: tuple[int, ...]) -> None:
    assert turn_entry(PROMPT, ids, PROFILE, Reuse.COMPOSE) is None


def test_a_watch_is_nobody_elses_and_falls_with_every_document() -> None:
    first, second = watch_entry(PROMPT), watch_entry(PROMPT)
    assert first.documents == (DocumentRef("a", b"1"),)
    assert first.content_hash != second.content_hash


def test_the_reply_is_followed_by_words_of_the_user() -> None:
    following = next_turn(ASKED, "It rains. <tool_call>")
    assert following is not None
    assert [message.role for message in following.messages] == [Role.USER, Role.ASSISTANT, Role.USER]
    assert following.messages[1].content == (Text("It rains. <tool_call>"),)
    assert next_turn(ASKED, "") is None


def test_calls_go_back_as_calls_and_are_followed_by_their_results() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    following = next_turn(ChatPrompt(ASKED.messages, tools=(TOOL,)), f"I look.\n{call}\n{call}")
    assert following is not None
    said, *results = following.messages[1:]
    assert said.content == (Text("I look."),)
    assert [call.arguments for call in said.tool_calls] == ['{"city": "Ulm"}'] * 2
    assert [result.answers for result in results] == [call.call_id for call in said.tool_calls]
    only = next_turn(ChatPrompt(ASKED.messages, tools=(TOOL,)), call)
    assert only is not None
    assert only.messages[1].content == ()
