"""Which answers flip, in which direction, and what the flips have in common."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eval.pack import NumberedPrompt
from eval.prompts import EvalPrompt
from eval.scoring import Outcome
from eval.settings import Mode

__all__ = ["Flip", "FlipRate", "find_flips", "flip_rates"]


@dataclass(frozen=True, slots=True)
class Flip:
    """A question that full recompute and a setting answer with different success. broken: the setting is the wrong one.

    head_distance: tokens from the head of its document to the first evidence; position: of that document in the prompt,
    0 the first; None for a question without evidence.
    """

    number: int
    setting: str
    type: str
    broken: bool
    question: str
    expected: str
    reference_answer: str
    answer: str
    head_distance: int | None
    position: int | None
    documents: int
    document_tokens: int | None


@dataclass(frozen=True, slots=True)
class FlipRate:
    """Of the questions in one bin that full recompute answers right, the share that a setting breaks."""

    setting: str
    relation: str
    bin: str
    questions: int
    broken_share: float


def find_flips(
    outcomes: Sequence[Outcome], prompts: Mapping[int, NumberedPrompt], settings: Sequence[str]
) -> list[Flip]:
    """All flips of some settings, in order of setting and question."""
    reference = {own.question: own for own in outcomes if own.setting == Mode.OFF}
    flips = [
        _flip(prompts[own.question], reference[own.question], own)
        for own in outcomes
        if own.setting in settings and own.scores.exact != reference[own.question].scores.exact
    ]
    return sorted(flips, key=lambda own: (settings.index(own.setting), own.number))


def flip_rates(
    outcomes: Sequence[Outcome], prompts: Mapping[int, NumberedPrompt], settings: Sequence[str]
) -> list[FlipRate]:
    """How the share of broken answers depends on where the evidence stands."""
    right = {own.question for own in outcomes if own.setting == Mode.OFF and own.scores.exact}
    rates: list[FlipRate] = []
    for setting in settings:
        found = {own.question: own for own in outcomes if own.setting == setting and own.question in right}
        for relation, bin_of in _RELATIONS.items():
            bins: dict[str, list[bool]] = {}
            for number, own in found.items():
                if prompts[number].prompt.evidence:
                    bins.setdefault(bin_of(prompts[number].prompt), []).append(not own.scores.exact)
            rates += [
                FlipRate(setting, relation, name, len(broken), sum(broken) / len(broken))
                for name, broken in sorted(bins.items(), key=lambda item: _order(item[0]))
            ]
    return rates


def _flip(own: NumberedPrompt, reference: Outcome, outcome: Outcome) -> Flip:
    prompt = own.prompt
    first = prompt.evidence[0] if prompt.evidence else None
    return Flip(
        number=own.number,
        setting=outcome.setting,
        type=prompt.type,
        broken=reference.scores.exact,
        question=prompt.question,
        expected=prompt.acceptable[0],
        reference_answer=reference.scores.answer,
        answer=outcome.scores.answer,
        head_distance=None if first is None else first.start,
        position=None if first is None else first.document,
        documents=len(prompt.documents),
        document_tokens=None if first is None else len(prompt.documents[first.document]),
    )


def _bin(value: int, edges: Sequence[int]) -> str:
    """`a–b` for the bin `[a, b)` that holds the value, `≥ a` for the last."""
    for low, high in zip((0, *edges), edges, strict=False):
        if value < high:
            return f"{low}–{high - 1}"
    return f"≥ {edges[-1]}"


def _order(name: str) -> int:
    return int(name.removeprefix("≥ ").split("–")[0])


def _head_distance(prompt: EvalPrompt) -> str:
    return _bin(min(own.start for own in prompt.evidence), (8, 16, 32, 64, 128))


def _position(prompt: EvalPrompt) -> str:
    return _bin(max(own.document for own in prompt.evidence), (1, 4, 8, 12))


def _length(prompt: EvalPrompt) -> str:
    return _bin(max(len(prompt.documents[own.document]) for own in prompt.evidence), (64, 96, 128, 192, 400))


_RELATIONS: Mapping[str, Callable[[EvalPrompt], str]] = {
    "tokens from the document's head to the evidence": _head_distance,
    "position of the document": _position,
    "tokens of the document": _length,
}
