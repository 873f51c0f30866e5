"""The one place where prompts become token ids."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from train.data.types import Document

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
DOCUMENT_START = "<|document_start|>"
DOCUMENT_END = "<|document_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END, DOCUMENT_START, DOCUMENT_END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class PromptIds:
    """A prompt's ids; `documents[i]` is document i's half-open range, markers included."""

    ids: tuple[int, ...]
    documents: tuple[range, ...]


class PromptEncoder:
    """Encodes a prompt as the concatenation of separately tokenized pieces.

    Template text is tokenized with special tokens. Client text (system, documents, question) is
    tokenized without any, so that no document can forge a control token. Documents stand in the
    last user message ahead of the question; no separator is added.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        self._full = Tokenizer.from_file(str(tokenizer_file))
        stripped = json.loads(tokenizer_file.read_text()) | {"added_tokens": []}
        self._plain = Tokenizer.from_str(json.dumps(stripped))
        self.end_of_text = self._special(END_OF_TEXT)
        self.message_end = self._special(MESSAGE_END)
        self._document_start = self._special(DOCUMENT_START)
        self._document_end = self._special(DOCUMENT_END)
        self._system_open = self.template(f"{MESSAGE_START}system\n")
        self._system_to_user = self.template(f"{MESSAGE_END}\n{MESSAGE_START}user\n")
        self._user_open = self.template(f"{MESSAGE_START}user\n")
        self.reply_open = self.template(f"{MESSAGE_END}\n{MESSAGE_START}assistant\n")
        self.next_user = self._system_to_user

    def _special(self, token: str) -> int:
        found = self._full.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no token {token}")
        return int(found)

    def template(self, text: str) -> list[int]:
        """Ids of template text."""
        return list(self._full.encode(text, add_special_tokens=False).ids)

    def client(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of client texts, each on its own."""
        batch = self._plain.encode_batch(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in batch]

    def opening(self, system: str) -> list[int]:
        """Ids up to the first document; an empty `system` means no system message."""
        if not system:
            return list(self._user_open)
        return self._system_open + self.client([system])[0] + self._system_to_user

    def document(self, content: Sequence[int]) -> list[int]:
        """Ids of a document from the ids of `document_text`."""
        return [self._document_start, *content, self._document_end]

    def prompt(self, system: str, documents: Sequence[Document], question: str) -> PromptIds:
        """Ids of a whole prompt, up to where the reply starts."""
        ids = self.opening(system)
        ranges: list[range] = []
        *contents, asked = self.client([*map(document_text, documents), question])
        for content in contents:
            start = len(ids)
            ids += self.document(content)
            ranges.append(range(start, len(ids)))
        return PromptIds(tuple(ids + asked + self.reply_open), tuple(ranges))

    def reply(self, answer: str) -> list[int]:
        """Ids of a reply with its end."""
        return [*self.client([answer])[0], self.message_end]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return str(self._full.decode(list(ids), skip_special_tokens=True))


def document_text(document: Document) -> str:
    """What is tokenized between a document's markers."""
    return f"{document.title}\n{document.text}"
