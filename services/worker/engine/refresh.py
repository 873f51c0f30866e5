"""Which blocks of stored bodies a refresh makes live: pure functions over plain data (design §6, *Refresh*)."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = [
    "BLOCKS",
    "Block",
    "BlockShape",
    "RefreshOrder",
    "Refreshed",
    "Side",
    "SweepCost",
    "TokenScores",
    "count_within",
    "cut_blocks",
    "gather",
    "most_wanted",
    "prices",
    "score_of",
    "sides_of",
    "tokens_within",
]

TokenScores = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """block_tokens: of a block, save a body's last one; replay_tokens: run ahead of it, so that its state is nearly right."""

    block_tokens: int = 16
    replay_tokens: int = 8


BLOCKS = BlockShape()


@dataclass(frozen=True, slots=True)
class Block:
    """Places `[start, stop)` of the prompt's segment number `segment`."""

    segment: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Side:
    """Places of a segment that run beside the walk over its prompt: replayed from `begin`, refreshed `[fresh, end)`."""

    begin: int
    fresh: int
    end: int

    @property
    def num_tokens(self) -> int:
        """That run through the model."""
        return self.end - self.begin

    @property
    def num_fresh(self) -> int:
        """Whose keys and values are renewed."""
        return self.end - self.fresh


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh makes live: places of each segment's body, in order, and segments that are live altogether."""

    blocks: tuple[tuple[range, ...], ...]
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SweepCost:
    """Measured seconds of a sweep over the layers, and of each live token in it."""

    pass_seconds: float
    token_seconds: float

    def seconds(self, live_tokens: int) -> float:
        """Of one sweep."""
        return self.pass_seconds + live_tokens * self.token_seconds


@dataclass(frozen=True, slots=True)
class RefreshOrder:
    """Refresh the `blocks` most wanted blocks, or, where that is None, as many as a budget of seconds has room for.

    The seconds run from admission to the first token; cost: what a sweep takes, None where that is not measured yet, and
    then nothing is refreshed under a budget.
    """

    blocks: int | None
    budget_seconds: float = 0.0
    cost: SweepCost | None = None


def cut_blocks(bodies: Sequence[range], block_tokens: int) -> list[Block]:
    """Every body cut into blocks from its first place on. bodies: of every segment, the places that its state stands for."""
    return [
        Block(number, start, min(start + block_tokens, body.stop))
        for number, body in enumerate(bodies)
        for start in range(body.start, body.stop, block_tokens)
    ]


def score_of(block: Block, token_scores: TokenScores) -> float:
    """What falls on a block, of scores of every segment's tokens."""
    return sum(token_scores[block.segment][block.start : block.stop])


def most_wanted(blocks: Iterable[Block], token_scores: TokenScores) -> list[Block]:
    """The highest score first; of equals, the earlier."""
    return sorted(blocks, key=lambda block: score_of(block, token_scores), reverse=True)


def prices(blocks: Iterable[Block], bodies: Sequence[range], replay_tokens: int) -> Iterator[int]:
    """Tokens that each block adds, its replay included, to all those before it."""
    chosen: dict[int, set[int]] = {}
    for block in blocks:
        places = chosen.setdefault(block.segment, set())
        begin = max(bodies[block.segment].start, block.start - replay_tokens)
        yield sum(place not in places for place in range(begin, block.stop))
        places.update(range(block.start, block.stop))


def gather(blocks: Collection[Block], bodies: Sequence[range]) -> Refreshed:
    """Chosen blocks by segment, neighbours joined; a body that is chosen whole is no body any more: its segment is live."""
    places: dict[int, set[int]] = {number: set() for number in range(len(bodies))}
    for block in blocks:
        places[block.segment].update(range(block.start, block.stop))
    whole = frozenset(number for number, own in places.items() if bodies[number] and len(own) == len(bodies[number]))
    return Refreshed(
        tuple(() if number in whole else tuple(_ranges(own)) for number, own in places.items()),
        whole,
    )


def sides_of(blocks: Sequence[range], body: range, replay_tokens: int) -> list[Side]:
    """Blocks of a body with their replay; what touches or overlaps runs as one."""
    sides: list[Side] = []
    for block in sorted(blocks, key=lambda own: own.start):
        fresh, stop = max(block.start, body.start), min(block.stop, body.stop)
        if fresh >= stop:
            continue
        begin = max(body.start, fresh - replay_tokens)
        if sides and begin <= sides[-1].end:
            sides[-1] = Side(sides[-1].begin, sides[-1].fresh, stop)
        else:
            sides.append(Side(begin, fresh, stop))
    return sides


def count_within(block_prices: Sequence[int], live_tokens: int, cost: SweepCost, seconds: float) -> int:
    """How many of the first blocks a sweep may refresh that has so many live tokens without them and so many seconds."""
    totals = list(accumulate(block_prices))
    return bisect_right(totals, seconds, key=lambda added: cost.seconds(live_tokens + added))


def tokens_within(most: int, live_tokens: int, cost: SweepCost, seconds: float) -> int:
    """How many tokens more a sweep may have that has so many live ones and so many seconds; no more than `most`."""
    return bisect_right(range(1, most + 1), seconds, key=lambda added: cost.seconds(live_tokens + added))


def _ranges(places: set[int]) -> Iterator[range]:
    """Runs of neighbouring places."""
    start: int | None = None
    for place in sorted(places):
        if start is None:
            start = place
        if place + 1 not in places:
            yield range(start, place + 1)
            start = None
