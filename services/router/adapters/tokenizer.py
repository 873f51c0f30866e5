"""The tokenizer library behind the domain's ports."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.router.adapters.token_bytes import TokenBytes
from services.router.domain.model import ModelRefusedError

__all__ = ["IncrementalDetokenizer", "TwoWayTokenizer"]

# Of the template's own texts, which prompts repeat again and again: how many are kept, and how long each may be.
_TEMPLATE_TEXTS = 1024
_LONGEST_TEMPLATE_TEXT = 256


class TwoWayTokenizer:
    """Two readings of one `tokenizer.json`: with special tokens for template text, without for client strings."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """Build both readings and check that client strings cannot become special tokens.

        Raises:
            ModelRefusedError: the file is no tokenizer, or a special token's text encodes to its id without it.
        """
        try:
            description: dict[str, Any] = json.loads(tokenizer_json)
            description |= {"truncation": None, "padding": None}
            added = description.get("added_tokens") or []
            self._template = Tokenizer.from_str(json.dumps(description))
            self._plain = Tokenizer.from_str(json.dumps(description | {"added_tokens": [], "post_processor": None}))
        except Exception as error:  # the library raises nothing more precise
            raise ModelRefusedError(f"the worker's tokenizer.json cannot be read: {error}") from error
        self._control_ids = frozenset(token["id"] for token in added if token.get("special"))
        self._spelling = TokenBytes(self._template, description)
        # Of one object an id: those of many documents are kept.
        self._shared_ids = tuple(range(max(self._plain.get_vocab().values(), default=0) + 1))
        self._encode_short_template = lru_cache(_TEMPLATE_TEXTS)(self._encode_template)
        self._longest_token_bytes = max((len(token.encode()) for token in self._plain.get_vocab()), default=1)
        for token in added:
            self._check_unforgeable(token["content"])

    def encode_template(self, text: str) -> tuple[int, ...]:
        """See `Tokenizer`."""
        if len(text) <= _LONGEST_TEMPLATE_TEXT:
            return self._encode_short_template(text)
        return self._encode_template(text)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """See `Tokenizer`."""
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):
            raise ModelRefusedError("a client string was encoded to a special token")
        return tuple(map(self._shared_ids.__getitem__, ids))

    def fewest_tokens(self, text: str) -> int:
        """See `Tokenizer`; the vocabulary's longest token bounds how much text one id can hold."""
        return len(text) // self._longest_token_bytes

    def new_detokenizer(self) -> "IncrementalDetokenizer":
        """A detokenizer for one reply."""
        return IncrementalDetokenizer(self._template, self._spelling)

    def _encode_template(self, text: str) -> tuple[int, ...]:
        return tuple(self._template.encode(text, add_special_tokens=False).ids)

    def _check_unforgeable(self, content: str) -> None:
        for text in (content, f" {content}", f"{content} x", f"x{content}\n{content}"):
            try:
                self.encode_plain(text)
            except ModelRefusedError as error:
                raise ModelRefusedError(f"text that spells {content!r} is encoded to that special token") from error


class IncrementalDetokenizer:
    """Text of one reply, id by id; holds back bytes that do not complete a character."""

    def __init__(self, tokenizer: Tokenizer, spelling: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._spelling = spelling
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer`."""
        return "".join(self._stream.step(self._tokenizer, token_id) or "" for token_id in token_ids)

    def spell(self, token_id: int) -> bytes:
        """See `Detokenizer`."""
        return self._spelling.spell(token_id)
