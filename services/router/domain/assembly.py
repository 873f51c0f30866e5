"""From a request's text to parts of token ids.

The chat template is rendered once with a random placeholder for every client string. Template text is tokenized with
special tokens, client strings without, so that no client string can forge a control token. The prompt's ids are the
concatenation of its parts' ids in every reuse mode.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from services.common.content import content_hash
from services.router.domain.known_parts import KnownParts
from services.router.domain.model import Profile
from services.router.domain.parts import Part, PartKind, Prompt, Reason
from services.router.domain.request import (
    ChatPrompt,
    Content,
    Document,
    Message,
    PromptError,
    Role,
    Text,
    TextPrompt,
)
from services.router.domain.slots import KeptSlot, SlotKind, SlotTable, tool_content
from services.router.domain.text_ports import ChatTemplate, TemplateError, Tokenizer
from services.router.domain.tools import Tool

__all__ = ["Assembler"]


# Tokenizing this many characters takes about a millisecond.
_MOST_UNKNOWN_CHARACTERS = 4096
_MOST_QUICK_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Assembler:
    """Everything that turns text into parts for one model; `known` are that model's own. Safe to call from several threads."""

    tokenizer: Tokenizer
    template: ChatTemplate
    message_ends: Mapping[Role, str]
    profile: Profile
    context_length: int
    known: KnownParts

    def assemble(self, prompt: ChatPrompt | TextPrompt) -> Prompt:
        """The prompt's parts.

        Raises:
            PromptError: it cannot fit the context, holds no token, or the template refuses it.
        """
        if isinstance(prompt, TextPrompt):
            self._refuse_hopeless(prompt.pieces, "prompt")
            return self._finish(self._text_parts(prompt), "prompt")
        messages = _place_documents(prompt)
        self._refuse_hopeless([item.text for message in messages for item in message.content], "messages")
        self._refuse_hopeless([tool.definition for tool in prompt.tools], "tools")
        return self._finish(self._chat_parts(messages, prompt.tools), "messages")

    def closing_ids(self, stop_token_ids: Collection[int]) -> tuple[int, ...]:
        """The tokens that end an assistant's message, where one of these is the first; none otherwise."""
        ids = self.tokenizer.encode_template(self.message_ends.get(Role.ASSISTANT, ""))
        return ids if ids and ids[0] in stop_token_ids else ()

    def is_quick(self, prompt: ChatPrompt | TextPrompt) -> bool:
        """Whether `assemble` takes about a millisecond: little text, or text whose parts are at hand."""
        contents = _contents(prompt)
        if sum(len(each.text) for each in contents) > _MOST_QUICK_CHARACTERS:
            return False
        unknown = 0
        for each in contents:
            unknown += 0 if each in self.known else len(each.text)
            if unknown > _MOST_UNKNOWN_CHARACTERS:
                return False
        return True

    def document_part(self, document: Document) -> Part:
        """A document as it stands in every prompt: a segment, or live when it is too short to be reused.

        Raises:
            PromptError: it cannot fit the context.
        """
        self._refuse_hopeless([document.text], "text")
        part = self._content_part(document)
        if part.num_tokens > self.context_length:
            raise PromptError(
                f"the document has {part.num_tokens} tokens; the model's context length is {self.context_length}",
                param="text",
                code="context_length_exceeded",
            )
        return part

    def _text_parts(self, prompt: TextPrompt) -> Iterator[Part]:
        yield from map(self._content_part, _text_contents(prompt))

    def _chat_parts(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[Part]:
        slots = SlotTable(self.message_ends)
        rows = [slots.message(message) for message in messages]
        offered = [slots.tool(tool) for tool in tools]
        try:
            rendered = self.template.render_prompt(rows, offered)
        except TemplateError as error:
            raise PromptError(f"the chat template refuses these messages: {error}", param="messages") from error
        opening, kept = slots.split(rendered)
        yield from self._template_parts(opening, "")
        for is_tools, group in groupby(kept, lambda each: each[0].kind is SlotKind.TOOL):
            run = list(group)
            yield from self._tool_block(run) if is_tools else self._slot_parts(run)

    def _slot_parts(self, kept: Sequence[KeptSlot]) -> Iterator[Part]:
        for slot, text in kept:
            part = self._content_part(slot.content)
            yield replace(part, ends_prefix=True) if slot.content.is_breakpoint else part
            yield from self._template_parts(text, slot.closing)

    def _tool_block(self, kept: Sequence[KeptSlot]) -> Iterator[Part]:
        """Tools that follow each other are one segment with the text between them."""
        ids: list[int] = []
        for slot, text in kept[:-1]:
            ids += self._content_part(slot.content).token_ids
            ids += self.tokenizer.encode_template(text)
        last, text = kept[-1]
        ids += self._content_part(last.content).token_ids
        is_breakpoint = any(slot.content.is_breakpoint for slot, _ in kept)
        yield replace(self._segment(last.content.text, tuple(ids)), ends_prefix=is_breakpoint)
        yield from self._template_parts(text, last.closing)

    def _template_parts(self, text: str, closing: str) -> Iterator[Part]:
        """Text of the template; `closing`, where it stands there, ends a message."""
        head, found, rest = text.partition(closing) if closing else ("", "", text)
        if found:
            yield _live(self.tokenizer.encode_template(head))
            yield replace(_live(self.tokenizer.encode_template(closing)), ends_prefix=True)
        else:
            rest = text
        if rest:
            yield _live(self.tokenizer.encode_template(rest))

    def _content_part(self, content: Content) -> Part:
        part = self.known.get(content)
        if part is None:
            part = self._new_part(content)
            self.known.put(content, part)
        return part

    def _new_part(self, content: Content) -> Part:
        if isinstance(content, Document):
            ids = (
                *self.tokenizer.encode_template(self.profile.document_open),
                *self.tokenizer.encode_plain(_plain_text(content)),
                *self.tokenizer.encode_template(self.profile.document_close),
            )
            digest = content.digest if content.document_id else b""
            return replace(
                self._segment(content.text, ids),
                document_id=content.document_id,
                document_digest=digest,
                title=content.title,
            )
        ids = self.tokenizer.encode_plain(content.text)
        return self._segment(content.text, ids) if content.is_segment else _live(ids)

    def _segment(self, text: str, ids: tuple[int, ...]) -> Part:
        if len(ids) < self.profile.min_segment_tokens or not text.strip():
            return Part(PartKind.LIVE, ids, Reason.TOO_SHORT)
        return Part(PartKind.SEGMENT, ids, content_hash=content_hash(self.profile.digest, ids))

    def _finish(self, parts: Iterator[Part], param: str) -> Prompt:
        merged = _merge_live([part for part in parts if part.token_ids])
        if not merged:
            raise PromptError("the prompt holds no tokens", param=param)
        last = merged[-1]
        reason = last.live_reason if last.live_reason is Reason.TOO_SHORT else Reason.LAST_PART
        merged[-1] = replace(last, kind=PartKind.LIVE, live_reason=reason)
        return Prompt(tuple(_mark_prefix(merged)))

    def _refuse_hopeless(self, texts: Sequence[str], param: str) -> None:
        """Spare the tokenizer a text that exceeds the context by its length alone."""
        fewest = sum(map(self.tokenizer.fewest_tokens, texts))
        if fewest > self.context_length:
            raise PromptError(
                f"the prompt has at least {fewest} tokens; the model's context length is {self.context_length}",
                param=param,
                code="context_length_exceeded",
            )


def _live(ids: tuple[int, ...]) -> Part:
    return Part(PartKind.LIVE, ids, Reason.NOT_MARKED)


def _contents(prompt: ChatPrompt | TextPrompt) -> list[Content]:
    if isinstance(prompt, TextPrompt):
        return list(_text_contents(prompt))
    items = [*prompt.documents, *(item for message in prompt.messages for item in message.content)]
    return [*items, *map(tool_content, prompt.tools)]


def _text_contents(prompt: TextPrompt) -> Iterator[Text]:
    *segments, last = prompt.pieces
    for piece in segments:
        yield Text(piece, is_segment=True)
    yield Text(last)


def _plain_text(content: Content) -> str:
    """What of it is tokenized as a client string."""
    if isinstance(content, Document) and content.title:
        return f"{content.title}\n{content.text}"
    return content.text


def _place_documents(prompt: ChatPrompt) -> list[Message]:
    """Documents of the request stand in the last user message ahead of its text."""
    messages = list(prompt.messages)
    if not prompt.documents:
        return messages
    users = [index for index, message in enumerate(messages) if message.role is Role.USER]
    if not users:
        raise PromptError("documents need a user message to stand in", param="documents")
    last = messages[users[-1]]
    messages[users[-1]] = replace(last, content=(*prompt.documents, *last.content))
    return messages


def _is_plain_live(part: Part) -> bool:
    return part.kind is PartKind.LIVE and part.live_reason is Reason.NOT_MARKED


def _merge_live(parts: Sequence[Part]) -> list[Part]:
    """Join neighbouring live parts inside a message; segments too short to reuse stay apart, to be explained."""
    merged: list[Part] = []
    for part in parts:
        previous = merged[-1] if merged else None
        if previous and not previous.ends_prefix and _is_plain_live(previous) and _is_plain_live(part):
            merged[-1] = replace(part, token_ids=previous.token_ids + part.token_ids)
        else:
            merged.append(part)
    return merged


def _mark_prefix(parts: Sequence[Part]) -> list[Part]:
    """Parts up to the last message end ahead of every segment and of the last part are of kind `prefix`."""
    first_segment = next((i for i, part in enumerate(parts) if part.kind is PartKind.SEGMENT), len(parts) - 1)
    ends = [i + 1 for i, part in enumerate(parts[:first_segment]) if part.ends_prefix]
    count = ends[-1] if ends else 0
    return [replace(part, kind=PartKind.PREFIX) for part in parts[:count]] + list(parts[count:])
