"""The bytes that single tokens stand for; a character may be spread over several of them."""

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

__all__ = ["TokenBytes"]

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# What pieces of SentencePiece vocabularies have in place of a space.
_SPACE = "\u2581"


class TokenBytes:
    """Reads the vocabulary of one `tokenizer.json`, given as a tokenizer and as its JSON."""

    def __init__(self, tokenizer: Tokenizer, description: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._added = {token["id"]: str(token["content"]) for token in description.get("added_tokens") or []}
        self._bytes = _byte_level_characters() if _is_byte_level(description.get("decoder")) else {}

    def spell(self, token_id: int) -> bytes:
        """A token's bytes; a special token's are those of its name, an unknown id has none."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._bytes:
            return b"".join(self._bytes.get(character) or character.encode() for character in token)
        if found := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(found[1])
        return token.replace(_SPACE, " ").encode()


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return decoder["type"] == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders") or []))


def _byte_level_characters() -> dict[str, bytes]:
    """Byte by the character that stands for it in byte-level vocabularies (GPT-2's): itself where it can be printed."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    characters = [*map(chr, printed), *(chr(256 + index) for index in range(len(others)))]
    return {character: bytes([byte]) for character, byte in zip(characters, printed + others, strict=True)}
