"""The tokenizer library behind the domain's ports."""

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from blake3 import blake3
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.router.adapters.token_bytes import TokenBytes
from services.router.domain.model import ModelRefusedError

__all__ = ["IncrementalDetokenizer", "MemoizedIds", "TwoWayTokenizer"]

# What an entry costs besides its ids: digest, list node, object headers.
_ENTRY_OVERHEAD_BYTES = 256
# Shorter texts are tokenized about as fast as they are hashed and looked up.
_SHORTEST_MEMOIZED = 32
# Of the template's own texts, which prompts repeat again and again: how many are kept, and how long each may be.
_TEMPLATE_TEXTS = 1024
_LONGEST_TEMPLATE_TEXT = 256


class MemoizedIds:
    """Least recently used ids by text digest, bounded in bytes. Safe to call from several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes held, overhead included."""
        return self._used_bytes

    def get(self, digest: bytes) -> tuple[int, ...] | None:
        """The ids of this text, or None."""
        with self._lock:
            ids = self._ids.get(digest)
            if ids is None:
                return None
            self._ids.move_to_end(digest)
        return tuple(ids)

    def holds(self, digest: bytes) -> bool:
        """Whether `get` would find this text's ids, which stay as old as they are."""
        with self._lock:
            return digest in self._ids

    def put(self, digest: bytes, ids: Sequence[int]) -> None:
        """Remember ids; the oldest make room, and what exceeds the capacity alone is not kept."""
        packed = array("I", ids)
        size = _entry_bytes(packed)
        with self._lock:
            if digest in self._ids or size > self._capacity_bytes:
                return
            while self._used_bytes + size > self._capacity_bytes:
                _, oldest = self._ids.popitem(last=False)
                self._used_bytes -= _entry_bytes(oldest)
            self._ids[digest] = packed
            self._used_bytes += size


def _entry_bytes(ids: "array[int]") -> int:
    return _ENTRY_OVERHEAD_BYTES + ids.itemsize * len(ids)


class TwoWayTokenizer:
    """Two readings of one `tokenizer.json`: with special tokens for template text, without for client strings."""

    def __init__(self, tokenizer_json: bytes, memo_bytes: int) -> None:
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
        self._memo = MemoizedIds(memo_bytes)
        self._encode_short_template = lru_cache(_TEMPLATE_TEXTS)(self._encode_template)
        self._longest_token_bytes = max((len(token.encode()) for token in self._plain.get_vocab()), default=1)
        for token in added:
            self._check_unforgeable(token["content"])

    def encode_template(self, text: str) -> tuple[int, ...]:
        """See `Tokenizer`."""
        if len(text) <= _LONGEST_TEMPLATE_TEXT:
            return self._encode_short_template(text)
        return self._encode_template(text)

    def is_known(self, text: str) -> bool:
        """See `Tokenizer`."""
        return len(text) >= _SHORTEST_MEMOIZED and self._memo.holds(blake3(text.encode()).digest())

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """See `Tokenizer`."""
        if len(text) < _SHORTEST_MEMOIZED:
            return self._encode_plain(text)
        digest = blake3(text.encode()).digest()
        ids = self._memo.get(digest)
        if ids is None:
            ids = self._encode_plain(text)
            self._memo.put(digest, ids)
        return ids

    def fewest_tokens(self, text: str) -> int:
        """See `Tokenizer`; the vocabulary's longest token bounds how much text one id can hold."""
        return len(text) // self._longest_token_bytes

    def new_detokenizer(self) -> "IncrementalDetokenizer":
        """A detokenizer for one reply."""
        return IncrementalDetokenizer(self._template, self._spelling)

    def _encode_template(self, text: str) -> tuple[int, ...]:
        return tuple(self._template.encode(text, add_special_tokens=False).ids)

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        ids = tuple(self._plain.encode(text, add_special_tokens=False).ids)
        if not self._control_ids.isdisjoint(ids):
            raise ModelRefusedError("a client string was encoded to a special token")
        return ids

    def _check_unforgeable(self, content: str) -> None:
        for text in (content, f" {content}", f"{content} x", f"x{content}\n{content}"):
            try:
                self._encode_plain(text)
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
