"""Page tables, and the geometry of one attention layer."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

import torch

from services.worker.ops.rotary import Rotary

__all__ = ["AttentionShape", "BaseGroup", "PageRow", "PageTable", "Span"]


@dataclass(frozen=True, slots=True)
class PageRow:
    """`count` tokens at the start of `page`, at true positions `first, first + 1, …`.

    base: the true position at which the stored rotation is zero; a key at position p is stored rotated by `p − base`.
    """

    page: int
    base: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """Slots `[start, stop)` of a pool seen as one row of tokens, at true positions from `first` on."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True, slots=True)
class BaseGroup:
    """All spans of one base."""

    base: int
    spans: tuple[Span, ...]

    @property
    def num_keys(self) -> int:
        """Keys in the group."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def first_position(self) -> int:
        """The lowest true position."""
        return min(span.first for span in self.spans)

    @property
    def last_position(self) -> int:
        """The highest true position."""
        return max(span.first + span.stop - span.start - 1 for span in self.spans)

    def positions(self, device: torch.device) -> torch.Tensor:
        """True positions `[num_keys]`."""
        return torch.cat(
            [torch.arange(span.first, span.first + span.stop - span.start, device=device) for span in self.spans]
        )


@dataclass(slots=True)
class PageTable:
    """The pages of one prompt, in any order. Grows while the prompt is decoded; `groups` is kept until it does."""

    page_size: int
    rows: list[PageRow] = field(default_factory=list)
    _groups: tuple[BaseGroup, ...] | None = None

    def extend(self, rows: Iterable[PageRow]) -> None:
        """Add rows."""
        self.rows.extend(rows)
        self._groups = None

    def grow_last(self, row: PageRow) -> None:
        """Replace the last row by one that holds more tokens."""
        self.rows[-1] = row
        self._groups = None

    def groups(self) -> tuple[BaseGroup, ...]:
        """Rows gathered by base, neighbouring full pages joined into spans."""
        if self._groups is None:
            ordered = sorted(self.rows, key=lambda row: (row.base, row.first))
            self._groups = tuple(
                BaseGroup(base, tuple(self._spans(rows))) for base, rows in groupby(ordered, key=lambda row: row.base)
            )
        return self._groups

    def _spans(self, rows: Iterable[PageRow]) -> list[Span]:
        spans: list[Span] = []
        for row in rows:
            start = row.page * self.page_size
            if spans and spans[-1].stop == start and spans[-1].first + spans[-1].stop - spans[-1].start == row.first:
                spans[-1] = Span(spans[-1].start, start + row.count, spans[-1].first)
            else:
                spans.append(Span(start, start + row.count, row.first))
        return spans


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """scale: factor on `q·k`; rotary: None where the layer has no rotary position."""

    scale: float
    rotary: Rotary | None
