"""Which blocks a refresh takes: against brute force over counts, and what no choice may break."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.prompt_refresh import choose, most_tokens, question_tokens, refresh_plan, refresh_served
from services.worker.engine.refresh import (
    BLOCKS,
    RefreshOrder,
    SweepCost,
    count_within,
    cut_blocks,
    gather,
    most_wanted,
    prices,
    sides_of,
)
from services.worker.engine.requests import ServedPart, Serving
from services.worker.engine.states import SegmentState

WINDOW = 4
lengths = st.lists(st.integers(WINDOW + 1, 90), min_size=1, max_size=5)
costs = st.builds(SweepCost, st.floats(0, 2), st.floats(0, 0.1))


def plan_of(body_lengths: Sequence[int]) -> CombinePlan:
    parts = [
        CombinePart((1,) * length, SegmentState((1,) * length, WINDOW, (), ()), keep=True) for length in body_lengths
    ]
    return CombinePlan(None, (CombinePart((1,) * 7, keep=True), *parts, CombinePart((1,) * 9)), 4)


def scores_of(plan: CombinePlan, seed: int) -> list[float]:
    return [float((place * 7919 + seed) % 101) for place in range(plan.num_tokens)]


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(0, 100), costs, st.floats(-1, 8))
def test_as_many_blocks_as_fit_by_trying_every_number(
    block_prices: list[int], live_tokens: int, cost: SweepCost, seconds: float
) -> None:
    fitting = [
        count
        for count in range(len(block_prices) + 1)
        if cost.pass_seconds + (live_tokens + sum(block_prices[:count])) * cost.token_seconds <= seconds
    ]
    assert count_within(block_prices, live_tokens, cost, seconds) == max(fitting, default=0)


@given(lengths, st.integers(0, 1000), st.integers(0, 40))
def test_what_is_priced_runs_and_is_refreshed(body_lengths: list[int], seed: int, count: int) -> None:
    """Blocks of all bodies, each place once; the tokens that run are no more than their prices, and no fewer than the blocks."""
    plan = plan_of(body_lengths)
    bodies = [part.body for part in plan.parts]
    blocks = cut_blocks(bodies, BLOCKS.block_tokens)
    places = [(block.segment, place) for block in blocks for place in range(block.start, block.stop)]
    assert sorted(places) == [(number, place) for number, body in enumerate(bodies) for place in body]
    starts = [0, *accumulate(len(part.token_ids) for part in plan.parts)]
    scores = scores_of(plan, seed)
    own = [scores[start : start + len(part.token_ids)] for start, part in zip(starts, plan.parts, strict=False)]
    ranked = most_wanted(blocks, own)
    sums = [sum(own[block.segment][block.start : block.stop]) for block in ranked]
    assert sums == sorted(sums, reverse=True)
    taken = ranked[:count]
    chosen = gather(taken, bodies)
    run = fresh = 0
    for number, body in enumerate(bodies):
        wanted = {place for block in taken if block.segment == number for place in range(block.start, block.stop)}
        if number in chosen.whole:
            assert wanted == set(body)
            run, fresh = run + len(body), fresh + len(body)
            continue
        sides = sides_of(chosen.blocks[number], body, BLOCKS.replay_tokens)
        assert wanted <= {place for side in sides for place in range(side.fresh, side.end)}
        assert all(before.end < after.begin for before, after in pairwise(sides))
        assert all(body.start <= side.begin <= side.fresh < side.end <= body.stop for side in sides)
        run, fresh = run + sum(side.num_tokens for side in sides), fresh + sum(side.num_fresh for side in sides)
    assert fresh <= run <= sum(prices(taken, bodies, BLOCKS.replay_tokens))


@given(lengths, st.integers(0, 1000), st.one_of(st.integers(0, 30), costs), st.floats(0, 9))
def test_a_choice_stays_within_what_is_reserved(
    body_lengths: list[int], seed: int, asked: int | SweepCost, seconds: float
) -> None:
    plan = plan_of(body_lengths)
    order = RefreshOrder(asked) if isinstance(asked, int) else RefreshOrder(None, seconds, asked)
    reserved = most_tokens(plan, order)
    if not reserved:
        return
    chosen = choose(plan, order, scores_of(plan, seed), 0.0)
    renewed = refresh_plan(plan, chosen)
    added = renewed.num_live - plan.num_live
    assert 0 <= added <= reserved
    for page_size in (1, 8, 16):
        before = CombinePlan(plan.prefix, plan.parts, plan.max_tokens, reserved).pages_needed(page_size)
        assert renewed.pages_needed(page_size) <= before
    if isinstance(asked, SweepCost) and added:
        assert asked.seconds(renewed.num_live) <= seconds * (1 + 1e-9)
    touched = [bool(part.sides) or number in chosen.whole for number, part in enumerate(renewed.parts)]
    first = touched.index(True) if True in touched else len(touched)
    assert [part.keep for part in renewed.parts[:first]] == [part.keep for part in plan.parts[:first]]
    assert not any(part.keep for part in renewed.parts[first:])
    served = [ServedPart(Serving.SEGMENT, len(part.walked_ids), len(part.body)) for part in plan.parts]
    for part, done in zip(plan.parts, refresh_served(served, plan, chosen), strict=True):
        assert done.live_tokens + done.reused_tokens == len(part.token_ids)
        assert done.live_tokens == len(part.walked_ids) + done.refreshed_tokens
    assert question_tokens(plan) == 9


def test_a_budget_without_room_for_both_passes_looks_for_nothing() -> None:
    """The first one is a sweep over the live tokens; then a block has to fit beside them."""
    plan, cost = plan_of([90, 90]), SweepCost(1.0, 0.01)
    needed = 2 * cost.seconds(plan.num_live) + BLOCKS.block_tokens * cost.token_seconds
    assert most_tokens(plan, RefreshOrder(None, needed - 0.01, cost)) == 0
    # Some of the first pass's time may be left over, and is reserved for.
    assert most_tokens(plan, RefreshOrder(None, needed + 0.01, cost)) > BLOCKS.block_tokens
