"""Which blocks of the segments a refresh makes live, by a setting's selection and share."""

import random
from collections.abc import Sequence
from itertools import accumulate, takewhile

from eval.capture import MIN_BODY, CapturedSegment
from eval.prompts import EvalPrompt
from eval.settings import Refresh, Selection, Setting
from services.worker.engine.refresh import (
    Block,
    Refreshed,
    TokenScores,
    cut_blocks,
    gather,
    prices,
    score_of,
)

__all__ = ["choose_blocks", "seam_tokens"]


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
    budget = refresh.live_share * prompt.document_tokens - seam_tokens(setting, segments)
    if refresh.selection is Selection.SEGMENTS:
        return _choose_segments(setting, segments, orders[0], budget)
    bodies = [_body(setting, segment) for segment in segments]
    found = cut_blocks(bodies, refresh.block_tokens)
    sorted_blocks = [sorted(found, key=_Ranking(prompt, refresh, scores, seed), reverse=True) for scores in orders]
    blocks = list(dict.fromkeys(block for turn in zip(*sorted_blocks, strict=True) for block in turn))
    blocks = blocks[: refresh.most_blocks]
    totals = accumulate(prices(blocks, bodies, refresh.replay_tokens))
    return gather(
        [block for block, _ in zip(blocks, takewhile(lambda total: total <= budget, totals), strict=False)], bodies
    )


def seam_tokens(setting: Setting, segments: Sequence[CapturedSegment]) -> int:
    """Live tokens of the segments without any refresh."""
    return sum(len(segment.token_ids) - len(_body(setting, segment)) for segment in segments)


def _body(setting: Setting, segment: CapturedSegment) -> range:
    """The places that its state stands for; none where it is too short to be composed."""
    length = len(segment.token_ids)
    seam = setting.seam_window.tokens(length)
    return range(length, length) if length - seam < MIN_BODY else range(seam, length)


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
        attended = score_of(block, self._token_scores)
        return attended + (1e6 if self._selection is Selection.ORACLE and self._holds_evidence(block) else 0.0)

    def _holds_evidence(self, block: Block) -> bool:
        return any(
            own.document == block.segment and own.start < block.stop and own.end > block.start
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
