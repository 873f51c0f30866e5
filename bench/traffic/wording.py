"""Texts of a wanted number of tokens, whatever tokenizer the server has: made of words that are one token each to it."""

import random
from collections.abc import Callable, Sequence
from functools import lru_cache

from bench.traffic.stream import Piece

__all__ = ["Wording", "WordingError", "learn_words"]

# Of which a server has to know so many as single tokens, or texts would hardly differ.
_LEAST_WORDS = 16
_REPEATED = 32
_HELD_TEXTS = 4096
CANDIDATES = (
    "the and of in on at by for with from its old new stone wooden river lake harbour bridge museum island valley market "
    "school church tower road winter summer people workers farmers built opened closed moved counted reported kept sold "
    "found lies stands runs holds serves about nearly three seven hundred years rooms house water city town light north "
    "south east west large small early later first last open free long short high low other many most part side place "
    "time work day name number line group state"
).split()


class WordingError(Exception):
    """The server's tokenizer cannot be written for; the message says why."""


def learn_words(count_tokens: Callable[[str], int], candidates: Sequence[str] = CANDIDATES) -> tuple[str, ...]:
    """Words that are one token each behind a space, by what the server counts.

    Raises:
        WordingError: there are too few.
    """
    base = count_tokens("the")
    found = tuple(word for word in candidates if count_tokens("the" + f" {word}" * _REPEATED) - base == _REPEATED)
    if len(found) < _LEAST_WORDS:
        raise WordingError(f"only {len(found)} of {len(candidates)} words are one token each to the server's tokenizer")
    return found


class Wording:
    """Texts of pieces. A piece's text follows from its name, version and number of tokens alone."""

    def __init__(self, words: Sequence[str], seed: int) -> None:
        self._words = tuple(words)
        self._seed = seed
        self.text = lru_cache(_HELD_TEXTS)(self._write)

    def _write(self, piece: Piece) -> str:
        source = random.Random(f"{self._seed}/{piece.name}/{piece.version}")
        return " ".join(source.choices(self._words, k=piece.tokens))
