"""Page tables, and the geometry of one attention layer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from services.worker.ops.rotary import Rotary

__all__ = ["AttentionShape", "BaseGroup", "PageRow", "PageRun", "PageTable", "PagedQueries", "Span"]

_Prepared = TypeVar("_Prepared")


@dataclass(frozen=True, slots=True)
class PageRow:
    """`count` tokens in `page` from its slot `offset` on, at true positions `first, first + 1, …`.

    base: the true position at which the stored rotation is zero; a key at position p is stored rotated by `p − base`.
    """

    page: int
    base: int
    first: int
    count: int
    offset: int = 0

    @property
    def pages(self) -> tuple[int, ...]:
        """The page, as of a `PageRun`."""
        return (self.page,)

    def rows(self, page_size: int) -> Iterator["PageRow"]:
        """Itself."""
        del page_size
        yield self

    def slots(self, page_size: int) -> range:
        """The tokens' slots, numbered over all pages."""
        start = self.page * page_size + self.offset
        return range(start, start + self.count)


@dataclass(frozen=True, slots=True)
class PageRun:
    """`count` tokens that fill pages in order from the start of the first one: a row a page, without an object for each.

    base, first: as of a `PageRow`.
    """

    pages: tuple[int, ...]
    base: int
    first: int
    count: int

    @property
    def offset(self) -> int:
        """As of a `PageRow`."""
        return 0

    def rows(self, page_size: int) -> Iterator[PageRow]:
        """Each page's."""
        for page, begin in zip(self.pages, range(0, self.count, page_size), strict=True):
            yield PageRow(page, self.base, self.first + begin, min(page_size, self.count - begin))


@dataclass(frozen=True, slots=True)
class Span:
    """Slots `[start, stop)` of a pool seen as one row of tokens, at true positions from `first` on."""

    start: int
    stop: int
    first: int

    @property
    def end(self) -> int:
        """The true position behind the last token."""
        return self.first + self.stop - self.start


@dataclass(frozen=True, slots=True)
class BaseGroup:
    """All spans of one base, at rising positions."""

    base: int
    spans: tuple[Span, ...]

    @property
    def last_position(self) -> int:
        """The highest true position."""
        return self.spans[-1].end - 1

    def positions(self, device: torch.device) -> torch.Tensor:
        """True positions of all keys, in order."""
        return torch.cat([torch.arange(span.first, span.end, device=device) for span in self.spans])


@dataclass(slots=True)
class PageTable:
    """The pages of one prompt; within one base, rows come at rising positions.

    entries: the rows, of which some stand together. prepared: what a form works out from them, as long as there are no more.

    Neighbouring full pages are joined into spans once, when somebody first asks, so that a long table costs a decode step
    nothing.
    """

    page_size: int
    entries: list[PageRow | PageRun] = field(default_factory=list)
    prepared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    _ends: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    _spans: dict[int, list[Span]] = field(default_factory=dict, compare=False, repr=False)
    _num_joined: int = field(default=0, compare=False, repr=False)

    @property
    def rows(self) -> list[PageRow]:
        """Every row on its own."""
        return [row for entry in self.entries for row in entry.rows(self.page_size)]

    @property
    def last(self) -> PageRow | PageRun:
        """The last entry."""
        return self.entries[-1]

    def extend(self, entries: Iterable[PageRow | PageRun]) -> None:
        """Add rows.

        Raises:
            ValueError: one does not rise within its base.
        """
        for entry in entries:
            end = self._ends.get(entry.base, entry.first)
            if entry.first < end:
                raise ValueError(f"row at position {entry.first} stands behind position {end} of its base")
            self.entries.append(entry)
            self._ends[entry.base] = entry.first + entry.count

    def grow_last(self) -> None:
        """One more token on the last row's page."""
        last = self.entries[-1]
        self.entries[-1] = replace(last, count=last.count + 1)
        self._ends[last.base] += 1
        if self._num_joined == len(self.entries):
            spans = self._spans[last.base]
            spans[-1] = Span(spans[-1].start, spans[-1].stop + 1, spans[-1].first)

    def groups(self) -> tuple[BaseGroup, ...]:
        """Spans gathered by base."""
        for entry in self.entries[self._num_joined :]:
            for row in entry.rows(self.page_size):
                self._join(row)
        self._num_joined = len(self.entries)
        return tuple(BaseGroup(base, tuple(spans)) for base, spans in self._spans.items())

    def _join(self, row: PageRow) -> None:
        slots = row.slots(self.page_size)
        spans = self._spans.setdefault(row.base, [])
        if spans and spans[-1].stop == slots.start and spans[-1].end == row.first:
            spans[-1] = Span(spans[-1].start, slots.stop, spans[-1].first)
        else:
            spans.append(Span(slots.start, slots.stop, row.first))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """scale: factor on `q·k`; rotary: None where the layer has no rotary position."""

    scale: float
    rotary: Rotary | None


@dataclass(frozen=True, slots=True)
class PagedQueries:
    """Which queries ask which pages: the same in every layer of a pass.

    positions `[N]` true; cu_queries: offsets `[B + 1]` of every request's queries; tables: one a request; on_host: the
    positions once more, as numbers, where a pass has them.
    is_fixed: what is prepared must stay where it is, for passes that are recorded once and replayed; positions may then have
    room behind the last query.
    prepared: what a form works out from the rest, once for all layers.
    """

    positions: torch.Tensor
    cu_queries: Sequence[int]
    tables: Sequence[PageTable]
    on_host: Sequence[int] | None = None
    is_fixed: bool = False
    prepared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def places(self) -> Sequence[int]:
        """The positions as numbers; without `on_host` the host waits for the device, once a pass."""
        return self.prepare("places", self.positions.tolist) if self.on_host is None else self.on_host

    def prepare(self, key: str, work_out: Callable[[], _Prepared]) -> _Prepared:
        """What a key names, worked out where nobody has done it yet."""
        if key not in self.prepared:
            self.prepared[key] = work_out()
        found: _Prepared = self.prepared[key]
        return found
