"""What is to combine, and where its live tokens stand: parts, their runs, pages and positions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from services.worker.engine.context import EngineContext
from services.worker.engine.pages import pages_for
from services.worker.engine.states import PrefixState, SegmentState
from services.worker.ops.paged_attention import PageRow, PageTable

__all__ = ["CombineLayout", "CombinePart", "CombinePlan", "Run"]


@dataclass(frozen=True, slots=True)
class CombinePart:
    """One part as the pass sees it: live from `live_start` on for `live_ids`, then a stored body where there is one.

    keep: a snapshot is wanted behind this part.
    """

    token_ids: tuple[int, ...]
    state: SegmentState | None = None
    keep: bool = False

    @property
    def num_live(self) -> int:
        """How many tokens run through the model."""
        return len(self.token_ids) if self.state is None else min(len(self.token_ids), self.state.seam_window)

    @property
    def live_ids(self) -> tuple[int, ...]:
        """These tokens."""
        return self.token_ids[: self.num_live]


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """A prompt to combine: an exact prefix, then parts; the last part is live. `max_tokens` pages are reserved behind it."""

    prefix: PrefixState | None
    parts: tuple[CombinePart, ...]
    max_tokens: int

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
        stretches[-1] += self.max_tokens
        return sum(pages_for(tokens, page_size) for tokens in stretches)


@dataclass(frozen=True, slots=True)
class Run:
    """Live tokens at true positions from `first` on; `part` is the index of the last part in it."""

    token_ids: tuple[int, ...]
    first: int
    part: int


def runs_of(plan: CombinePlan) -> list[Run]:
    """Live runs in order: neighbouring live parts join unless a snapshot stands between them."""
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
    return [
        Run(tuple(chain.from_iterable(plan.parts[index].live_ids for index in own)), first, own[-1])
        for own, first in zip(joined, starts, strict=True)
    ]


class CombineLayout:
    """Where the live tokens of one prompt stand: pages, positions, and the order of runs and bodies."""

    def __init__(self, context: EngineContext, plan: CombinePlan, owned: Sequence[int]) -> None:
        self._size = context.pages.page_size
        self.table = PageTable(self._size)
        self.positions: list[int] = []
        self.write_slots: list[int] = []
        self.rows_after: dict[int, int] = {}
        self._pages = list(owned)
        # The page that the last run ended in, and how many of its slots are taken.
        self._page, self._taken = -1, self._size
        if plan.prefix is not None:
            self.table.extend(plan.prefix.rows)
        self.runs = runs_of(plan)
        for run in self.runs:
            self._place(run, plan.parts[run.part])
        self.spare = self._pages

    def _place(self, run: Run, part: CombinePart) -> None:
        length = len(run.token_ids)
        rows = list(self._take(run.first, length))
        self.table.extend(rows)
        self.positions.extend(range(run.first, run.first + length))
        self.write_slots.extend(slot for row in rows for slot in row.slots(self._size))
        if part.state is not None:
            start = run.first + length - part.state.seam_window
            self.table.extend([part.state.rows(start)])
        self.rows_after[run.part] = len(self.table.entries)
        if part.keep:
            self._taken = self._size

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
