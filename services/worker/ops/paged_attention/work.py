"""Cuts paged attention into programs, on the host: which queries meet which pages, in which split.

A block of queries sees, of every base in its table, the pages up to the position of its last query. The pages that it sees
are cut into splits of equal length, so that programs take about equally long; no program is made for what nobody sees.
Everything is a column of int32; what concerns one table alone is worked out once for as many rows as it has.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.ops.paged_attention.types import PagedQueries, PageRow, PageRun, PageTable
from services.worker.ops.tiles import block

__all__ = ["BLOCK_FIELDS", "HeadTiles", "Tiles", "Work", "room_for"]

# Programs of one launch: four rounds over the 132 multiprocessors of an H100 or H200.
PROGRAMS = 528
# A split of fewer keys costs more to join than it saves.
MIN_SPLIT_KEYS = 256
# Of a program: first query token, one past the last; first group, one past the last; first row, one past the last; which
# split of its block it is, and of how many.
BLOCK_FIELDS = 8
# Columns begin where 16 bytes do, so that a kernel meets pointers of one alignment only.
_ALIGNED = 4
# Positions stay below, so that a group and a position make one number.
_GROUP_STRIDE = 1 << 32

_Integers = NDArray[np.int64]


def room_for(count: int) -> int:
    """A quarter more than a column has now, and at least 64 numbers more."""
    return -(-(count + count // 4) // 64) * 64 + 64


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """How query heads are cut: `group` of them stand in one tile with their tokens, `count` tiles of heads a token.

    rows: the most that a tile of queries has where one token's heads are no more; least_rows: the fewest.
    """

    group: int
    count: int
    rows: int
    least_rows: int = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query tokens of a block and their rows (tokens times heads of a tile), and the most pages of a split."""

    rows: int
    tokens: int
    split_pages: int

    @classmethod
    def of(cls, asked: PagedQueries, heads: HeadTiles, page_size: int) -> "Tiles":
        """Large tiles for many queries; splits so short that even one request has programs for the whole chip."""
        longest = max(end - begin for begin, end in pairwise(asked.cu_queries))
        wanted = max(heads.least_rows, min(heads.rows, block(heads.group * longest)))
        rows = max(block(heads.group), wanted)
        return cls(rows, max(1, rows // heads.group), 0).cut_anew(asked, heads, page_size)

    def cut_anew(self, asked: PagedQueries, heads: HeadTiles, page_size: int) -> "Tiles":
        """The same blocks, in splits as other queries want them."""
        seen = _Sight.of(asked, self.tokens).block_pages
        return replace(self, split_pages=_split_pages(seen, heads.count, max(1, MIN_SPLIT_KEYS // page_size)))


def _split_pages(seen: _Integers, head_tiles: int, least: int) -> int:
    """The shortest splits that make no more than `PROGRAMS` programs of blocks that see so many pages.

    Where blocks alone are more programs than that, a split is cut at twice the mean.
    """
    mean = -(-head_tiles * int(seen.sum()) // PROGRAMS)
    shortest = max(least, mean)
    lengths = range(shortest, max(shortest, 2 * mean) + 1)
    fitting = bisect_left(
        lengths,
        True,
        hi=len(lengths) - 1,
        key=lambda length: head_tiles * int(_num_splits(seen, length).sum()) <= PROGRAMS,
    )
    return lengths[fitting]


def _num_splits(seen: _Integers, split_pages: int) -> _Integers:
    return -(-seen // split_pages)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Rows of page tables, those of one base together.

    base `[G]` of every group; rows `[G + 1]`: its first row; slot, first, count `[R]` of every row; tables `[B + 1]`: every
    table's first group; num_entries: of the tables.
    """

    base: _Integers
    rows: _Integers
    slot: _Integers
    first: _Integers
    count: _Integers
    tables: _Integers
    num_entries: int

    @classmethod
    def of(cls, table: PageTable) -> "_Groups":
        """The last row counts as full, for it grows unseen: what stands behind the farthest query is masked."""
        known = table.prepared.get("groups")
        if known is None or known.num_entries != len(table.entries):
            known = table.prepared["groups"] = _group(table)
        found: _Groups = known
        return found

    @classmethod
    def join(cls, own: Sequence["_Groups"]) -> "_Groups":
        """Several tables' groups, numbered one behind the other."""
        cu_rows = [0, *accumulate(len(groups.slot) for groups in own)]
        rows = [groups.rows[:-1] + offset for groups, offset in zip(own, cu_rows, strict=False)]
        return cls(
            base=np.concatenate([groups.base for groups in own]),
            rows=np.concatenate([*rows, _integers(cu_rows[-1:])]),
            slot=np.concatenate([groups.slot for groups in own]),
            first=np.concatenate([groups.first for groups in own]),
            count=np.concatenate([groups.count for groups in own]),
            tables=_integers([0, *accumulate(len(groups.base) for groups in own)]),
            num_entries=sum(groups.num_entries for groups in own),
        )

    def seen(self, group: _Integers, position: _Integers) -> _Integers:
        """How many rows of a group begin at or before a position: the first ones, since they rise within a group."""
        owner = np.repeat(np.arange(len(self.base)), np.diff(self.rows))
        order = owner * _GROUP_STRIDE + self.first
        return np.searchsorted(order, group * _GROUP_STRIDE + position, side="right") - self.rows[group]


def _group(table: PageTable) -> _Groups:
    size, entries = table.page_size, _by_base(table)
    base, first, count, offset = (
        _integers([getattr(entry, name) for entry in entries]) for name in ("base", "first", "count", "offset")
    )
    num_rows = _integers([len(entry.pages) for entry in entries])
    pages = _integers([page for entry in entries for page in entry.pages])
    owner, begin = np.repeat(np.arange(len(entries)), num_rows), size * _within(num_rows)
    counts = np.minimum(size, count[owner] - begin)
    last = next(index for index, entry in enumerate(entries) if entry is table.last)
    counts[int(num_rows[: last + 1].sum()) - 1] = size - offset[last]
    starts = np.flatnonzero(np.diff(base, prepend=base[0] - 1))
    return _Groups(
        base=base[starts],
        rows=np.concatenate([_offsets(num_rows)[starts], _integers([len(pages)])]),
        slot=pages * size + offset[owner],
        first=first[owner] + begin,
        count=counts,
        tables=_integers([0, len(starts)]),
        num_entries=len(entries),
    )


def _by_base(table: PageTable) -> list[PageRow | PageRun]:
    """Entries of one base together, since every group costs a rotation of the queries; bases by their first position."""
    gathered: dict[int, list[PageRow | PageRun]] = {}
    for entry in table.entries:
        gathered.setdefault(entry.base, []).append(entry)
    return [entry for entries in sorted(gathered.values(), key=lambda entries: entries[0].first) for entry in entries]


def _integers(values: Sequence[int]) -> _Integers:
    return np.array(values, dtype=np.int64)


def _within(counts: _Integers) -> _Integers:
    """Places inside runs of such lengths: 0, 1, 0, 1, 2 for 2 and 3."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, slots=True)
class _Sight:
    """What every block of queries sees, as pairs of a block and a group of its table.

    begin, end `[b]`: a block's query tokens; pairs `[b + 1]`: its first pair; group `[p]` of a pair; pages `[p + 1]`: how
    many pages are seen ahead of a pair, over all blocks.
    """

    groups: _Groups
    begin: _Integers
    end: _Integers
    pairs: _Integers
    group: _Integers
    pages: _Integers

    @classmethod
    def of(cls, asked: PagedQueries, tokens: int) -> "_Sight":
        """Blocks of so many tokens.

        Raises:
            ValueError: a block of queries sees no key.
        """
        found = asked.prepare(f"sight {tokens}", lambda: _look(asked, tokens))
        if not found.block_pages.all():
            raise ValueError("a query sees no key")
        return found

    @property
    def block_pages(self) -> _Integers:
        """Pages that each block sees `[b]`."""
        return np.diff(self.pages[self.pairs])

    def locate(self, page: _Integers) -> tuple[_Integers, _Integers]:
        """Group and row of the n-th page seen, counted over all blocks."""
        pair = np.searchsorted(self.pages, page, side="right") - 1
        group = self.group[pair]
        return group, self.groups.rows[group] + page - self.pages[pair]


def _look(asked: PagedQueries, tokens: int) -> _Sight:
    groups, cu_queries = _Groups.join([_Groups.of(table) for table in asked.tables]), _integers(asked.cu_queries)
    num_blocks = -(-np.diff(cu_queries) // tokens)
    request = np.repeat(np.arange(len(num_blocks)), num_blocks)
    begin = cu_queries[request] + tokens * _within(num_blocks)
    end = np.minimum(begin + tokens, cu_queries[request + 1])
    places = asked.places()
    farthest = _integers([places[last - 1] for last in end.tolist()])
    num_groups = np.diff(groups.tables)[request]
    group = np.repeat(groups.tables[request], num_groups) + _within(num_groups)
    seen = groups.seen(group, np.repeat(farthest, num_groups))
    return _Sight(groups, begin, end, _offsets(num_groups), group, _offsets(seen))


def _offsets(counts: _Integers) -> _Integers:
    return np.concatenate([_integers([0]), np.cumsum(counts)])


@dataclass(frozen=True, slots=True)
class Work:
    """columns, in the order of a launch: blocks; base and rows of groups; slot, first and count of rows; cu_partial.

    cu_partial: offsets `[N + 1]` of every token's partial rows, one a split, none where its block is not split.
    num_partial: their number.
    """

    columns: tuple[_Integers, ...]
    num_partial: int

    @classmethod
    def cut(cls, asked: PagedQueries, tiles: Tiles) -> "Work":
        """Every block over its splits, the longest programs first, since programs start in their order."""
        sight = _Sight.of(asked, tiles.tokens)
        groups, num_splits = sight.groups, _num_splits(sight.block_pages, tiles.split_pages)
        num_rows = np.repeat(np.where(num_splits > 1, num_splits, 0), sight.end - sight.begin)
        cu_partial = _offsets(num_rows)
        columns = (
            _programs(sight, num_splits).ravel(),
            groups.base,
            groups.rows,
            groups.slot,
            groups.first,
            groups.count,
            cu_partial,
        )
        return cls(tuple(_aligned(column) for column in columns), -(-int(cu_partial[-1]) // _ALIGNED) * _ALIGNED)

    def joined(self, sizes: Sequence[int]) -> torch.Tensor:
        """All columns one behind the other, each with room for `sizes` numbers, on the CPU; blocks in the room are empty."""
        room = np.zeros(sum(sizes), dtype=np.int32)
        # An empty block ends where it begins, at a query that exists.
        room[: sizes[0]].reshape(-1, BLOCK_FIELDS)[:, :2] = 1
        for column, begin in zip(self.columns, accumulate(sizes, initial=0), strict=False):
            room[begin : begin + len(column)] = column
        return torch.from_numpy(room)


def _programs(sight: _Sight, num_splits: _Integers) -> _Integers:
    """Fields of every program `[programs, BLOCK_FIELDS]`."""
    owner, split = np.repeat(np.arange(len(num_splits)), num_splits), _within(num_splits)
    ahead, seen, splits = sight.pages[sight.pairs[owner]], sight.block_pages[owner], num_splits[owner]
    start, stop = (ahead + edge * seen // splits for edge in (split, split + 1))
    first_group, first_row = sight.locate(start)
    last_group, last_row = sight.locate(stop - 1)
    queries = (sight.begin[owner], sight.end[owner])
    fields = np.stack([*queries, first_group, last_group + 1, first_row, last_row + 1, split, splits], axis=1)
    return fields[np.argsort(start - stop, kind="stable")]


def _aligned(column: _Integers) -> _Integers:
    """Padded with zeros to a multiple of the alignment."""
    missing = -len(column) % _ALIGNED
    return np.concatenate([column, np.zeros(missing, dtype=column.dtype)]) if missing else column
