"""What a refresh does to one prompt's plan: how much it may take, which blocks it takes, and what it says of them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.refresh import (
    BLOCKS,
    Refreshed,
    RefreshOrder,
    Side,
    count_within,
    cut_blocks,
    gather,
    most_wanted,
    prices,
    sides_of,
    tokens_within,
)
from services.worker.engine.requests import ServedPart

__all__ = ["choose", "most_tokens", "question_tokens", "refresh_plan", "refresh_served"]

# The question is what follows the last segment; of a long one its end says enough.
_MOST_QUESTION_TOKENS = 128


def most_tokens(plan: CombinePlan, order: RefreshOrder) -> int:
    """More tokens than this no choice of blocks adds to the plan; 0 where looking for blocks is not worth a pass."""
    in_bodies = sum(len(part.body) for part in plan.parts)
    if order.blocks is not None:
        return min(in_bodies, order.blocks * (BLOCKS.block_tokens + BLOCKS.replay_tokens))
    if order.cost is None:
        return 0
    # The pass that looks takes its time out of the budget.
    left = order.budget_seconds - order.cost.seconds(plan.num_live)
    if tokens_within(in_bodies, plan.num_live, order.cost, left) < BLOCKS.block_tokens:
        return 0
    return tokens_within(in_bodies, plan.num_live, order.cost, order.budget_seconds)


def question_tokens(plan: CombinePlan) -> int:
    """How many of the prompt's last tokens say what is attended to."""
    last = max(index for index, part in enumerate(plan.parts) if part.state is not None)
    return min(sum(len(part.token_ids) for part in plan.parts[last + 1 :]), _MOST_QUESTION_TOKENS)


def choose(plan: CombinePlan, order: RefreshOrder, scores: Sequence[float], elapsed_seconds: float) -> Refreshed:
    """The blocks of the plan's parts, by number of the part, within what is reserved for them.

    scores: how much each token of the prompt wants renewal; elapsed_seconds: since admission.
    """
    bodies = [part.body for part in plan.parts]
    ranked = most_wanted(cut_blocks(bodies, BLOCKS.block_tokens), _by_part(plan, scores))
    if order.blocks is not None:
        return gather(ranked[: order.blocks], bodies)
    if order.cost is None:
        return gather((), bodies)
    added = list(prices(ranked, bodies, BLOCKS.replay_tokens))
    count = count_within(added, plan.num_live, order.cost, order.budget_seconds - elapsed_seconds)
    return gather(ranked[:count], bodies)


def _by_part(plan: CombinePlan, scores: Sequence[float]) -> list[Sequence[float]]:
    tokens = iter(scores[plan.prefix_tokens :])
    return [list(islice(tokens, len(part.token_ids))) for part in plan.parts]


def refresh_plan(plan: CombinePlan, refreshed: Refreshed) -> CombinePlan:
    """The plan with the chosen blocks live. No snapshot is taken behind the first of them: its key says that all was composed."""
    parts: list[CombinePart] = []
    has_begun = False
    for number, part in enumerate(plan.parts):
        sides = _sides(part, number, refreshed)
        is_whole = number in refreshed.whole
        has_begun |= is_whole or bool(sides)
        state = None if is_whole else part.state
        parts.append(replace(part, state=state, sides=sides, keep=part.keep and not has_begun))
    return replace(plan, parts=tuple(parts), refresh_tokens=0)


def _sides(part: CombinePart, number: int, refreshed: Refreshed) -> tuple[Side, ...]:
    return tuple(sides_of(refreshed.blocks[number], part.body, BLOCKS.replay_tokens))


def refresh_served(served: Sequence[ServedPart], plan: CombinePlan, refreshed: Refreshed) -> tuple[ServedPart, ...]:
    """How the parts of a plan are served, with refreshed tokens as live ones; served: of the plan's parts, in order."""
    counts = [
        len(part.body) if number in refreshed.whole else sum(side.num_fresh for side in _sides(part, number, refreshed))
        for number, part in enumerate(plan.parts)
    ]
    return tuple(_refreshed(each, count) for each, count in zip(served, counts, strict=True))


def _refreshed(each: ServedPart, count: int) -> ServedPart:
    """A body was reused or captured as a whole."""
    return replace(
        each,
        live_tokens=each.live_tokens + count,
        reused_tokens=max(0, each.reused_tokens - count),
        captured_tokens=max(0, each.captured_tokens - count),
        refreshed_tokens=count,
    )
