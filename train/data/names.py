"""Fictional names, split so that training and test share no name word."""

import random
import zlib

from train.data.schema import PROSE
from train.data.types import Split

_ONSETS = ("b br c ch cl d dr f fl g gl gr h j k kr l m n p pl qu r s sh sk st t th tr v vr w y z").split()
_VOWELS = "a e i o u a e i o ai ea ou".split()
_CODAS = ["", "", "", *"l n r s m nd rn lt x th ck rk ss".split()]
_TEST_SHARE = 4


def split_of(word: str) -> Split:
    """The only split in which a name word may appear."""
    return Split.TEST if zlib.crc32(word.encode()) % _TEST_SHARE == 0 else Split.TRAIN


class NameSource:
    """Draws names whose words are new within one scene."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._rng = rng
        self._split = split
        self._used: set[str] = set()

    def _word(self) -> str:
        pick = self._rng.random
        while True:
            syllables = 2 if pick() < 0.75 else 3
            text = "".join(
                _ONSETS[int(pick() * len(_ONSETS))] + _VOWELS[int(pick() * len(_VOWELS))] for _ in range(syllables)
            )
            word = (text + _CODAS[int(pick() * len(_CODAS))]).capitalize()
            if word not in self._used and split_of(word) is self._split:
                self._used.add(word)
                return word

    def name(self, kind: str) -> str:
        """A new name of a person, place, organisation, device or river."""
        if kind == "person":
            return f"{self._word()} {self._word()}"
        if kind == "organisation":
            return f"{self._word()} {self._rng.choice(PROSE.values['firm'])}"
        if kind == "device":
            return f"the {self._word()} {self._rng.choice(PROSE.values['ware'])}"
        return self._word()
