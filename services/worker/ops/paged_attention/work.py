"""Cuts paged attention into programs, on the host: which queries meet which pages, in which split.

Everything is a column of int32; what concerns one table alone is worked out once for as many rows as it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.ops.paged_attention.types import PagedQueries, PageRow, PageTable

__all__ = ["BLOCK_FIELDS", "Tiles", "Work", "block", "room_for"]

# Programs of one launch: four for each of the 132 multiprocessors of an H100 or H200, so that uneven ones even out.
PROGRAMS = 528
# A split of fewer keys costs more to join than it saves.
MIN_SPLIT_KEYS = 256
# First query token of a block, one past the last, first group, one past the last, place of its partial result; 3 unused.
BLOCK_FIELDS = 8
# Columns begin where 16 bytes do, so that a kernel meets pointers of one alignment only.
_ALIGNED = 4

_Integers = NDArray[np.int32]


def block(channels: int) -> int:
    """The smallest tile that a matrix product takes."""
    return max(16, 1 << (channels - 1).bit_length())


def room_for(count: int) -> int:
    """A quarter more than a column has now, and at least 64 numbers more."""
    return -(-(count + count // 4) // 64) * 64 + 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query tokens of a block and their rows (tokens times heads a key head), and pages of a split."""

    rows: int
    tokens: int
    split_pages: int

    @classmethod
    def of(cls, asked: PagedQueries, queries: torch.Tensor, keys: torch.Tensor) -> "Tiles":
        """Large tiles for many queries; splits so short that even one request has programs for the whole chip."""
        (_, heads, key_dim), (_, page_size, kv_heads, _) = queries.shape, keys.shape
        group = heads // kv_heads
        widest = 128 if queries.itemsize == 2 and key_dim <= 256 else 64
        longest = max(end - begin for begin, end in pairwise(asked.cu_queries))
        rows = max(block(group), min(widest, block(group * longest)))
        tokens = max(1, rows // group)
        blocks = sum(-(-(end - begin) // tokens) for begin, end in pairwise(asked.cu_queries))
        splits = -(-PROGRAMS // max(1, blocks * kv_heads))
        pages = max((len(table.rows) for table in asked.tables), default=1)
        return cls(rows, tokens, max(1, MIN_SPLIT_KEYS // page_size, -(-pages // splits)))


@dataclass(frozen=True, slots=True)
class _Groups:
    """One table's rows and their groups of one base, as columns.

    base, first `[G]`: of every group; rows `[G + 1]`: its first row; page, row_first, count: of every row; splits: groups.
    """

    base: _Integers
    first: _Integers
    rows: _Integers
    page: _Integers
    row_first: _Integers
    count: _Integers
    splits: tuple[range, ...]

    @classmethod
    def of(cls, table: PageTable, split_pages: int) -> "_Groups":
        """Pages of one base together, cut into splits of so many; the last row counts as full, for it grows unseen.

        What is stored behind the farthest query is masked by its position.
        """
        key = f"groups {split_pages}"
        known = table.prepared.get(key)
        if known is None or len(known.page) != len(table.rows):
            known = table.prepared[key] = _group(table, split_pages)
        found: _Groups = known
        return found


def _group(table: PageTable, split_pages: int) -> _Groups:
    rows = _by_base(table)
    pages = [row.page for row in rows]
    bases = [row.base for row in rows]
    starts = [index for index in range(len(rows)) if index % split_pages == 0 or bases[index] != bases[index - 1]]
    firsts_of_splits = [group for group, start in enumerate(starts) if start % split_pages == 0]
    splits = tuple(range(*edge) for edge in pairwise([*firsts_of_splits, len(starts)]))
    last = table.rows[-1]
    return _Groups(
        base=_column([bases[start] for start in starts]),
        first=_column([rows[start].first for start in starts]),
        rows=_column([*starts, len(rows)]),
        page=_column(pages),
        row_first=_column([row.first for row in rows]),
        count=_column([table.page_size if row is last else row.count for row in rows]),
        splits=splits,
    )


def _by_base(table: PageTable) -> list[PageRow]:
    """Rows of one base together, since every group costs a rotation of the queries; bases by their first position."""
    gathered: dict[int, list[PageRow]] = {}
    for row in table.rows:
        gathered.setdefault(row.base, []).append(row)
    return [row for rows in sorted(gathered.values(), key=lambda rows: rows[0].first) for row in rows]


def _column(values: Sequence[int]) -> _Integers:
    return np.array(values, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Work:
    """columns, in the order of a launch: blocks, groups' base, first and rows, rows' page, first and count, cu_places, places.

    cu_places and places: the partial rows of every token. num_partial: their number, 0 where no table is split.
    """

    columns: tuple[_Integers, ...]
    num_partial: int

    @classmethod
    def cut(cls, asked: PagedQueries, tiles: Tiles) -> "Work":
        """Blocks of queries over splits of tables."""
        own = [_Groups.of(table, tiles.split_pages) for table in asked.tables]
        group_offsets = [0, *accumulate(len(groups.base) for groups in own)]
        row_offsets = [0, *accumulate(len(groups.page) for groups in own)]
        blocks: list[int] = []
        places: list[range] = []
        partial = 0
        for request, groups in enumerate(own):
            begin, end = asked.cu_queries[request], asked.cu_queries[request + 1]
            first_partial = partial
            for split in groups.splits:
                groups_of = (group_offsets[request] + split.start, group_offsets[request] + split.stop)
                for start in range(begin, end, tiles.tokens):
                    blocks += [start, min(start + tiles.tokens, end), *groups_of, partial + start - begin, 0, 0, 0]
                partial += end - begin
            places += [range(first_partial + token, partial, end - begin) for token in range(end - begin)]
        is_split = any(len(groups.splits) > 1 for groups in own)
        group_rows = [groups.rows[:-1] + offset for groups, offset in zip(own, row_offsets, strict=False)]
        columns = (
            _column(blocks),
            np.concatenate([groups.base for groups in own]),
            np.concatenate([groups.first for groups in own]),
            np.concatenate([*group_rows, _column(row_offsets[-1:])]),
            np.concatenate([groups.page for groups in own]),
            np.concatenate([groups.row_first for groups in own]),
            np.concatenate([groups.count for groups in own]),
            _column([0, *accumulate(len(rows) for rows in places)]),
            _column([row for rows in places for row in rows]),
        )
        return cls(tuple(_aligned(column) for column in columns), -(-partial // _ALIGNED) * _ALIGNED if is_split else 0)

    def joined(self, sizes: Sequence[int]) -> torch.Tensor:
        """All columns one behind the other, each with room for `sizes` numbers, on the CPU; blocks in the room are empty."""
        room = np.zeros(sum(sizes), dtype=np.int32)
        # An empty block ends where it begins, at a query that exists.
        room[: sizes[0]].reshape(-1, BLOCK_FIELDS)[:, :2] = 1
        for column, begin in zip(self.columns, accumulate(sizes, initial=0), strict=False):
            room[begin : begin + len(column)] = column
        return torch.from_numpy(room)


def _aligned(column: _Integers) -> _Integers:
    """Padded with zeros to a multiple of the alignment."""
    return np.pad(column, (0, -len(column) % _ALIGNED))
