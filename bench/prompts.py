"""Documents and questions of the CPU benchmark: eight documents of about 400 tokens, seeded."""

import random
from dataclasses import dataclass

__all__ = ["BenchPrompt", "make_prompt"]

_NUM_DOCUMENTS = 8
_WORDS_A_DOCUMENT = 212
_SYSTEM = "You answer questions from the documents. Keep the answer short and use the words of the documents."
_QUESTIONS = (
    "Which town lies on the northern shore of the lake?",
    "Who designed the harbour bridge, and when was it opened?",
    "What does the museum keep in its oldest hall?",
    "How many people live on the island in winter?",
)
_WORDS = (
    "the a of in and on at by for with its old new stone wooden northern southern river lake harbour bridge museum "
    "island valley market school church tower road winter summer people workers farmers sailors built opened closed "
    "repaired moved counted reported kept sold found lies stands runs crosses holds serves about nearly three seven "
    "twelve forty hundred thousand metres years tonnes rooms boats families"
).split()


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """documents: pairs of title and text; one question a round, so that no prompt repeats as a whole."""

    system: str
    documents: tuple[tuple[str, str], ...]
    questions: tuple[str, ...]


def make_prompt(seed: int) -> BenchPrompt:
    """The same documents for the same seed. Their words are plain, their content does not matter to a timing."""
    chosen = random.Random(seed)
    documents = tuple(
        (f"Report on the {chosen.choice(_WORDS)} {seed}-{index}", _text(chosen)) for index in range(_NUM_DOCUMENTS)
    )
    return BenchPrompt(_SYSTEM, documents, _QUESTIONS)


def _text(chosen: random.Random) -> str:
    words = [chosen.choice(_WORDS) for _ in range(_WORDS_A_DOCUMENT)]
    sentences = [" ".join(words[start : start + 12]).capitalize() for start in range(0, len(words), 12)]
    return ". ".join(sentences) + "."
