"""The end of a turn: what the next one will send of it, and under which chain the state behind the reply may be kept."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.common.content import HASH_BYTES, content_hash
from services.router.domain.entries import CacheEntry, EntryKind, documents_of, prefix_entries
from services.router.domain.model import Profile
from services.router.domain.parts import Prompt
from services.router.domain.plan import Ticket
from services.router.domain.request import ChatPrompt, GenerationRequest, Message, Reuse, Role, Text
from services.router.domain.tool_calls import ToolCallParser
from services.router.domain.tools import ToolCall

__all__ = ["TurnEnd", "TurnWatch", "may_go_on", "next_turn", "turn_entry", "watch_entry"]


class TurnEnd(StrEnum):
    """What became of the state behind a reply, and why it was not kept.

    `length`: `max_tokens` cut the reply; `stop`: a stop string did; `not_held`: the worker had no room, or the reply ended with
    another token than its message does; `not_composed`: a segment was computed in place; `other_ids`: the next turn will have
    other tokens; `invalidated`: something in it was, since the request was planned; `known`: it is stored or being computed
    already; `refused`: the worker or the directory did not take it; `failed`: one of them did not answer.
    """

    KEPT = "kept"
    LENGTH = "length"
    STOP = "stop"
    NOT_HELD = "not_held"
    NOT_COMPOSED = "not_composed"
    OTHER_IDS = "other_ids"
    INVALIDATED = "invalidated"
    KNOWN = "known"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TurnWatch:
    """A ticket from the request's own plan that nobody uses: it dies with whatever the prompt holds, and with the lease.

    While the directory has it still, nothing of the prompt was invalidated since the plan.
    """

    entry: CacheEntry
    ticket: Ticket


def may_go_on(request: GenerationRequest) -> bool:
    """Whether a next turn can begin with this one as it is: documents of a request move on to its newest message."""
    is_chat = isinstance(request.prompt, ChatPrompt) and not request.prompt.documents
    is_single = request.num_replies == 1
    return is_chat and is_single and request.options.reuse is not Reuse.OFF and not request.sampling.ignore_eos


def watch_entry(prompt: Prompt) -> CacheEntry:
    """An entry that is nobody else's, and falls with every document of the prompt."""
    return CacheEntry(EntryKind.PREFIX, secrets.token_bytes(HASH_BYTES), prompt.num_tokens, documents_of(prompt.parts))


def next_turn(prompt: ChatPrompt, reply: str) -> ChatPrompt | None:
    """The conversation as the next turn will send it, up to some words of its own; None behind a reply of nothing."""
    text, calls = _take_apart(prompt, reply)
    if not text and not calls:
        return None
    said = Message(Role.ASSISTANT, (Text(text),) if text else (), calls)
    results = tuple(Message(Role.TOOL, (Text("."),), answers=call.call_id) for call in calls)
    return ChatPrompt((*prompt.messages, said, *(results or (Message(Role.USER, (Text("."),)),))), tools=prompt.tools)


def turn_entry(prompt: Prompt, token_ids: Sequence[int], profile: Profile, reuse: Reuse) -> CacheEntry | None:
    """The place in the next turn's prompt behind just these tokens; None where no snapshot may stand there."""
    if [token for part in prompt.parts for token in part.token_ids][: len(token_ids)] != list(token_ids):
        return None
    hashes = [content_hash(profile.digest, part.token_ids) for part in prompt.parts]
    entries = prefix_entries(prompt, hashes, profile.min_body, reuse)
    return next((entry for entry in entries if entry.num_tokens == len(token_ids)), None)


def _take_apart(prompt: ChatPrompt, reply: str) -> tuple[str, tuple[ToolCall, ...]]:
    if not prompt.tools:
        return reply, ()
    parser = ToolCallParser(prompt.tools)
    found = [*parser.push(reply), *parser.flush()]
    text = "".join(each for each in found if isinstance(each, str))
    return text, tuple(each for each in found if isinstance(each, ToolCall))
