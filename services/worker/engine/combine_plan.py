"""What is to combine, and where its live tokens stand: parts, their runs, pages and positions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from services.worker.engine.context import EngineContext
from services.worker.engine.pages import pages_for
from services.worker.engine.refresh import Side
from services.worker.engine.states import PrefixState, SegmentState
from services.worker.ops.paged_attention import PageRow, PageTable

__all__ = ["CombineLayout", "CombinePart", "CombinePlan", "Run", "SideRun"]


@dataclass(frozen=True, slots=True)
class CombinePart:
    """One part as the pass sees it: tokens that the walk runs through, then a stored body where there is one.

    keep: a snapshot is wanted behind this part; sides: places of the body that run beside the walk, in order.
    """

    token_ids: tuple[int, ...]
    state: SegmentState | None = None
    keep: bool = False
    sides: tuple[Side, ...] = ()

    @property
    def body(self) -> range:
        """The places that the stored body stands for; none without one."""
        return range(0) if self.state is None else range(self.state.seam_window, len(self.token_ids))

    @property
    def walked_ids(self) -> tuple[int, ...]:
        """Tokens of the walk."""
        return self.token_ids if self.state is None else self.token_ids[: self.state.seam_window]

    @property
    def num_live(self) -> int:
        """How many tokens run through the model."""
        return len(self.walked_ids) + sum(side.num_tokens for side in self.sides)


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """A prompt to combine: an exact prefix, then parts; the last part is live.

    Pages are reserved for `max_tokens` behind it, and for `refresh_tokens` that are to run beside the walk and not chosen yet.
    """

    prefix: PrefixState | None
    parts: tuple[CombinePart, ...]
    max_tokens: int
    refresh_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.parts or not self.parts[-1].token_ids or self.parts[-1].state is not None:
            raise ValueError("the last part of a prompt is live and has at least one token")

    @property
    def prefix_tokens(self) -> int:
        """Tokens that the prefix covers."""
        return 0 if self.prefix is None else len(self.prefix.token_ids)

    @property
    def num_live(self) -> int:
        """Tokens that run through the model."""
        return sum(part.num_live for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """The prompt's length."""
        return self.prefix_tokens + sum(len(part.token_ids) for part in self.parts)

    def pages_needed(self, page_size: int) -> int:
        """Pages for live and generated tokens; runs share them up to a snapshot, behind which a page of its own begins."""
        stretches = [0]
        for part in self.parts:
            stretches[-1] += part.num_live
            if part.keep:
                stretches.append(0)
        stretches[-1] += self.max_tokens + self.refresh_tokens
        return sum(pages_for(tokens, page_size) for tokens in stretches)


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of the walk at true positions from `first` on, then a stored body where there is one.

    part: the index of the last part in it; keep: a snapshot is wanted behind it; is_head: its state is wanted since blocks of
    the body that follows start from it.
    """

    token_ids: tuple[int, ...]
    first: int
    part: int
    state: SegmentState | None = None
    keep: bool = False
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class SideRun:
    """Rows of a refreshed block with its replay. It starts from the state behind run `head`, the head of a stored body."""

    rows: range
    head: int
    state: SegmentState
    side: Side


def runs_of(plan: CombinePlan) -> list[Run]:
    """The walk's runs in order: neighbouring live parts join unless a snapshot stands between them.

    A body of which blocks are refreshed has a run of its own, without tokens.
    """
    joined: list[list[int]] = []
    starts: list[int] = []
    position = plan.prefix_tokens
    joinable = False
    for index, part in enumerate(plan.parts):
        if joinable:
            joined[-1].append(index)
        else:
            joined.append([index])
            starts.append(position)
        joinable = part.state is None and not part.keep
        position += len(part.token_ids)
    return [run for own, first in zip(joined, starts, strict=True) for run in _runs(plan, own, first)]


def _runs(plan: CombinePlan, own: Sequence[int], first: int) -> Iterator[Run]:
    """The runs of joined parts, the first of which stands at a position."""
    token_ids = tuple(chain.from_iterable(plan.parts[index].walked_ids for index in own))
    part = plan.parts[own[-1]]
    if part.sides:
        yield Run(token_ids, first, own[-1], is_head=True)
        first, token_ids = first + len(token_ids), ()
    yield Run(token_ids, first, own[-1], part.state, part.keep)


class CombineLayout:
    """Where the live tokens of one prompt stand: pages, positions, and the order of runs and bodies.

    token_ids, positions, write_slots: of all rows, in order of position; walked_rows: those of the walk, whose runs are `runs`;
    sides: the others.
    """

    def __init__(self, context: EngineContext, plan: CombinePlan, owned: Sequence[int]) -> None:
        self._size = context.pages.page_size
        self.table = PageTable(self._size)
        self.token_ids: list[int] = []
        self.walked_rows: list[int] = []
        self.sides: list[SideRun] = []
        self.positions: list[int] = []
        self.write_slots: list[int] = []
        self.rows_after: dict[int, int] = {}
        self._pages = list(owned)
        # The page that the last run ended in, and how many of its slots are taken.
        self._page, self._taken = -1, self._size
        if plan.prefix is not None:
            self.table.extend(plan.prefix.rows)
        self.runs = runs_of(plan)
        for index, run in enumerate(self.runs):
            self._place(index, run, plan.parts[run.part])
        self.spare = self._pages

    def _place(self, index: int, run: Run, part: CombinePart) -> None:
        behind = run.first + len(run.token_ids)
        first_row = len(self.token_ids)
        self.table.extend(self._write(run.token_ids, run.first))
        self.walked_rows.extend(range(first_row, len(self.token_ids)))
        if run.is_head and part.state is not None:
            self._place_sides(index, part, part.state, behind - part.state.seam_window)
        elif run.state is not None and not part.sides:
            self.table.extend([run.state.rows(behind - run.state.seam_window)])
        self.rows_after[run.part] = len(self.table.entries)
        if run.keep:
            self._taken = self._size

    def _place_sides(self, head: int, part: CombinePart, state: SegmentState, start: int) -> None:
        """A segment at position `start`: its stored keys with those of refreshed blocks in their place."""
        place = state.seam_window
        for side in part.sides:
            self.table.extend(state.rows_of(start, range(place, side.fresh), self._size))
            first_row = len(self.token_ids)
            # What is replayed has its stored keys; its own go where no table looks.
            self._write(part.token_ids[side.begin : side.fresh], start + side.begin)
            self.table.extend(self._write(part.token_ids[side.fresh : side.end], start + side.fresh))
            self.sides.append(SideRun(range(first_row, len(self.token_ids)), head, state, side))
            place = side.end
        self.table.extend(state.rows_of(start, range(place, len(part.token_ids)), self._size))

    def _write(self, token_ids: Sequence[int], first: int) -> list[PageRow]:
        """Rows of tokens from a position on, with the page rows that their keys go to."""
        rows = list(self._take(first, len(token_ids)))
        self.token_ids.extend(token_ids)
        self.positions.extend(range(first, first + len(token_ids)))
        self.write_slots.extend(slot for row in rows for slot in row.slots(self._size))
        return rows

    def _take(self, first: int, length: int) -> Iterator[PageRow]:
        """Rows of a run: the rest of the page that the last one ended in, then pages of its own."""
        placed = 0
        while placed < length:
            if self._taken == self._size:
                self._page, self._taken = self._pages.pop(0), 0
            count = min(self._size - self._taken, length - placed)
            yield PageRow(self._page, 0, first + placed, count, self._taken)
            placed += count
            self._taken += count
