"""How much every document token wants renewal, by the selections of a refresh."""

from collections.abc import Sequence

import torch

from eval.capture import CapturedSegment
from eval.prompts import EvalPrompt
from eval.rig import Rig
from eval.settings import Prime, Setting
from services.worker.engine.reach import body_reach
from services.worker.engine.refresh import TokenScores

__all__ = ["COMPARED_PRIMES", "Captures", "by_document", "prime_changes", "reached"]

# Their difference says which tokens lean on what precedes them.
COMPARED_PRIMES = (Prime.START, Prime.DOCUMENT)

# Of every prompt of a pack, by prime.
Captures = dict[Prime, list[list[CapturedSegment]]]


def reached(segment: CapturedSegment, scores: Sequence[float], setting: Setting) -> Sequence[float]:
    """Scores of a segment's tokens, those of its body as far as the state ahead of it reaches."""
    seam, length = setting.seam_window.tokens(len(scores)), len(scores)
    planes = segment.planes.get((seam, length))
    if planes is None:
        return scores
    reach = body_reach([plane.decay for plane in planes], length - seam).tolist()
    return [*scores[:seam], *(own * left for own, left in zip(scores[seam:], reach, strict=True))]


def by_document(prompt: EvalPrompt, scores: Sequence[float]) -> TokenScores:
    """Scores of a prompt's tokens, document by document."""
    first = len(prompt.opening)
    found: list[list[float]] = []
    for document in prompt.documents:
        found.append(list(scores[first : first + len(document)]))
        first += len(document)
    return found


def prime_changes(rig: Rig, captures: Captures, row: int) -> TokenScores:
    """How far each token's keys and values move, relative to their size, when something else precedes the segment."""
    pairs = zip(*(captures[prime][row] for prime in COMPARED_PRIMES), strict=True)
    return [_moved(rig, bare, primed) for bare, primed in pairs]


def _moved(rig: Rig, bare: CapturedSegment, primed: CapturedSegment) -> list[float]:
    total = torch.zeros(len(bare.token_ids), device=rig.device)
    for pool in rig.memory.page_pools:
        for plane in (pool.keys, pool.values):
            before, after = (
                plane[own.pages.start : own.pages.stop].flatten(0, 1)[: len(own.token_ids)].flatten(1)
                for own in (bare, primed)
            )
            total += (after - before).norm(dim=1) / before.norm(dim=1)
    moved: list[float] = total.tolist()
    return moved
