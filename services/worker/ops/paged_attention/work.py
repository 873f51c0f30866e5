"""Cuts paged attention into programs, on the host: which queries meet which pages, in which split."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from services.worker.ops.paged_attention.types import PagedQueries, PageRow, PageTable

__all__ = ["Groups", "Tiles", "Work", "block", "cut", "group_pages"]

# Programs of one launch: four for each of the 132 multiprocessors of an H100 or H200, so that uneven ones even out.
PROGRAMS = 528
# A split of fewer keys costs more to join than it saves.
MIN_SPLIT_KEYS = 256


def block(channels: int) -> int:
    """The smallest tile that a matrix product takes."""
    return max(16, 1 << (channels - 1).bit_length())


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
class Groups:
    """Rows of all tables and their groups of one base, as columns.

    starts: first position of every group; rows: its first row; splits: of every table.
    """

    base: list[int]
    starts: list[int]
    rows: list[int]
    page: list[int]
    first: list[int]
    count: list[int]
    splits: list[list[range]]


def group_pages(tables: Sequence[PageTable], split_pages: int) -> Groups:
    """Gather tables into groups of one base, and cut groups into splits of so many pages."""
    groups = Groups([], [], [0], [], [], [], [])
    for table in tables:
        splits: list[range] = []
        begin, pages, base = len(groups.base), 0, None
        for row in _by_base(table):
            full = pages == split_pages
            if row.base != base or full:
                if base is not None:
                    groups.rows.append(len(groups.page))
                if full:
                    splits.append(range(begin, len(groups.base)))
                    begin, pages = len(groups.base), 0
                groups.base.append(row.base)
                groups.starts.append(row.first)
                base = row.base
            groups.page.append(row.page)
            groups.first.append(row.first)
            groups.count.append(row.count)
            pages += 1
        groups.rows.append(len(groups.page))
        splits.append(range(begin, len(groups.base)))
        groups.splits.append(splits)
    return groups


def _by_base(table: PageTable) -> list[PageRow]:
    """Rows of one base together, since every group costs a rotation of the queries; bases by their first position."""
    gathered: dict[int, list[PageRow]] = {}
    for row in table.rows:
        gathered.setdefault(row.base, []).append(row)
    return [row for rows in sorted(gathered.values(), key=lambda rows: rows[0].first) for row in rows]


@dataclass(frozen=True, slots=True)
class Work:
    """blocks as `_attend_kernel` reads them; cu_places and places: the partial rows of every token."""

    blocks: list[int]
    cu_places: list[int]
    places: list[int]
    num_partial: int

    @property
    def is_split(self) -> bool:
        """Whether any token has more than one split."""
        return len(self.places) > len(self.cu_places) - 1


def cut(cu_queries: Sequence[int], groups: Groups, tokens_a_block: int) -> Work:
    """Blocks of at most so many query tokens over the splits of their own table; cu_queries: offsets `[B + 1]`."""
    blocks: list[int] = []
    places: list[int] = []
    cu_places = [0]
    partial = 0
    for request, splits in enumerate(groups.splits):
        begin, end = cu_queries[request], cu_queries[request + 1]
        for split in splits:
            for start in range(begin, end, tokens_a_block):
                stop = min(start + tokens_a_block, end)
                blocks += [start, stop, split.start, split.stop, partial + start - begin]
            partial += end - begin
        for token in range(end - begin):
            rows = range(partial - (end - begin) * len(splits) + token, partial, end - begin)
            places.extend(rows)
            cu_places.append(len(places))
    return Work(blocks, cu_places, places, partial)
