"""Which blocks of the segments a refresh makes live."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eval.capture import MIN_BODY, CapturedSegment
from eval.layout import Refreshed
from eval.prompts import EvalPrompt
from eval.settings import Refresh, Selection, Setting

__all__ = ["Block", "TokenScores", "choose_blocks"]

TokenScores = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Block:
    """Places `[start, stop)` of document `document`."""

    document: int
    start: int
    stop: int


def choose_blocks(
    prompt: EvalPrompt,
    setting: Setting,
    segments: Sequence[CapturedSegment],
    orders: Sequence[TokenScores],
    seed: int,
) -> Refreshed:
    """The best blocks that the budget holds, taken by turns from each order.

    orders: scores of every document's tokens; the higher, the more a token's renewal is wanted.
    """
    refresh = setting.refresh
    if refresh is None:
        raise ValueError("the setting has no refresh")
    budget = refresh.live_share * prompt.document_tokens - _seam_tokens(setting, segments)
    if refresh.selection is Selection.SEGMENTS:
        return _choose_segments(setting, segments, orders[0], budget)
    found = list(_blocks(setting, refresh, segments))
    sorted_blocks = [sorted(found, key=_Ranking(prompt, refresh, scores, seed), reverse=True) for scores in orders]
    blocks = dict.fromkeys(block for turn in zip(*sorted_blocks, strict=True) for block in turn)
    chosen: dict[int, set[int]] = {index: set() for index in range(len(segments))}
    spent = 0
    for block in blocks:
        seam = setting.seam_window.tokens(len(segments[block.document].token_ids))
        cost = _cost(seam, refresh, chosen[block.document], block)
        if spent + cost > budget:
            break
        spent += cost
        chosen[block.document].update(range(block.start, block.stop))
    return Refreshed(tuple(tuple(_ranges(places)) for places in chosen.values()))


def _seam_tokens(setting: Setting, segments: Sequence[CapturedSegment]) -> int:
    lengths = [len(segment.token_ids) for segment in segments]
    seams = [setting.seam_window.tokens(length) for length in lengths]
    return sum(length if length - seam < MIN_BODY else seam for length, seam in zip(lengths, seams, strict=True))


def _blocks(setting: Setting, refresh: Refresh, segments: Sequence[CapturedSegment]) -> Iterator[Block]:
    for index, segment in enumerate(segments):
        length = len(segment.token_ids)
        seam = setting.seam_window.tokens(length)
        if length - seam < MIN_BODY:
            continue
        for start in range(seam, length, refresh.block_tokens):
            yield Block(index, start, min(start + refresh.block_tokens, length))


def _cost(seam: int, refresh: Refresh, chosen: set[int], block: Block) -> int:
    """Tokens that a block adds, its replay included, beside what is chosen already."""
    replayed = range(max(seam, block.start - refresh.replay_tokens), block.stop)
    return sum(place not in chosen for place in replayed)


class _Ranking:
    """A block's score: the sum over its tokens; evidence first for the oracle; chance for random."""

    def __init__(self, prompt: EvalPrompt, refresh: Refresh, token_scores: TokenScores, seed: int) -> None:
        self._prompt = prompt
        self._selection = refresh.selection
        self._token_scores = token_scores
        self._random = random.Random(seed)

    def __call__(self, block: Block) -> float:
        if self._selection is Selection.RANDOM:
            return self._random.random()
        attended = sum(self._token_scores[block.document][block.start : block.stop])
        return attended + (1e6 if self._selection is Selection.ORACLE and self._holds_evidence(block) else 0.0)

    def _holds_evidence(self, block: Block) -> bool:
        return any(
            own.document == block.document and own.start < block.stop and own.end > block.start
            for own in self._prompt.evidence
        )


def _choose_segments(
    setting: Setting, segments: Sequence[CapturedSegment], token_scores: TokenScores, budget: float
) -> Refreshed:
    """Whole documents in order of attention; one that does not fit is passed over."""
    whole: set[int] = set()
    for index in sorted(range(len(segments)), key=lambda own: sum(token_scores[own]), reverse=True):
        length = len(segments[index].token_ids)
        cost = length - setting.seam_window.tokens(length)
        if 0 < cost <= budget:
            budget -= cost
            whole.add(index)
    return Refreshed(tuple(() for _ in segments), frozenset(whole))


def _ranges(places: set[int]) -> Iterator[range]:
    """Runs of neighbouring places."""
    start: int | None = None
    for place in sorted(places):
        if start is None:
            start = place
        if place + 1 not in places:
            yield range(start, place + 1)
            start = None
