"""Paged attention on a GPU: a program a block of queries, key head and split of the keys; one more launch joins the splits.

The query heads of one key head stand in one tile with their tokens. Pages of one base stand in one group, for which the
tile's queries are rotated once by their distance to the base (design §5), so that stored bytes are read as they are.
Work is cut on the host: every split covers about `SPLIT_PAGES` pages, which keeps long tables busy on the whole chip.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.ops.paged_attention.types import AttentionShape, PagedQueries, PageTable
from services.worker.ops.rotary import Rotary

__all__ = ["attend"]

# Query rows (tokens times heads a key head) of one program.
TILE_ROWS = 64
SPLIT_PAGES = 128
_LOG2_E = 1.4426950408889634


@triton.jit
def _attend_kernel(
    q, keys, values, positions, frequencies, partners, signs,
    blocks, group_base, group_rows, row_page, row_first, row_count,
    partial, maxima, totals, outputs,
    scale, Hq, Hkv, D, Dv, key_stride, value_stride,
    G: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    ROTARY: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """blocks rows: first query token, one past the last, first group, one past the last, place of its partial result."""
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_begin, q_end = tl.load(blocks + 5 * i_b), tl.load(blocks + 5 * i_b + 1)
    o_m, o_d, o_n, o_v = tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, PAGE), tl.arange(0, BDV)
    token = q_begin + o_m // G
    head = i_h * G + o_m % G
    m_m = token < q_end
    place = tl.load(positions + token, mask=m_m, other=-1)
    farthest = tl.load(positions + q_end - 1)
    m_q = m_m[:, None] & (o_d < D)[None, :]
    p_q = (token.to(tl.int64) * Hq + head)[:, None] * D
    b_q = tl.load(q + p_q + o_d[None, :], mask=m_q, other=0.0)
    b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BM], dtype=tl.float32)
    b_o = tl.zeros([BM, BDV], dtype=tl.float32)
    if ROTARY:
        o_p = tl.load(partners + o_d, mask=o_d < D, other=0)
        b_f = tl.load(frequencies + o_d, mask=o_d < D, other=0.0)
        b_s = tl.load(signs + o_d, mask=o_d < D, other=0.0)
        b_p = tl.load(q + p_q + o_p[None, :], mask=m_q, other=0.0).to(tl.float32) * b_s[None, :]
    for i_g in range(tl.load(blocks + 5 * i_b + 2), tl.load(blocks + 5 * i_b + 3)):
        b_r = b_q
        if ROTARY:
            angle = (place - tl.load(group_base + i_g)).to(tl.float32)[:, None] * b_f[None, :]
            b_r = (b_q.to(tl.float32) * tl.cos(angle) + b_p * tl.sin(angle)).to(b_q.dtype)
        for i_r in range(tl.load(group_rows + i_g), tl.load(group_rows + i_g + 1)):
            first = tl.load(row_first + i_r)
            if first <= farthest:
                # Behind the farthest query a page may hold slots that nobody has written: NaN times 0 is NaN.
                m_n = (o_n < tl.load(row_count + i_r)) & (first + o_n <= farthest)
                slot = tl.load(row_page + i_r).to(tl.int64) * PAGE + o_n
                p_k = (slot * Hkv + i_h)[None, :] * key_stride + o_d[:, None]
                b_k = tl.load(keys + p_k, mask=m_n[None, :] & (o_d < D)[:, None], other=0.0)
                b_x = tl.dot(b_r, b_k, input_precision=PRECISION) * scale
                seen = m_n[None, :] & (first + o_n[None, :] <= place[:, None])
                b_x = tl.where(seen, b_x, float("-inf"))
                b_n = tl.maximum(b_m, tl.max(b_x, axis=1))
                # A row that has seen nothing yet keeps a maximum of minus infinity, from which nothing is subtracted.
                shift = tl.where(b_n == float("-inf"), 0.0, b_n)
                b_w = tl.exp2(b_x - shift[:, None])
                kept = tl.exp2(b_m - shift)
                b_l = b_l * kept + tl.sum(b_w, axis=1)
                p_v = (slot * Hkv + i_h)[:, None] * value_stride + o_v[None, :]
                b_v = tl.load(values + p_v, mask=m_n[:, None] & (o_v < Dv)[None, :], other=0.0)
                b_o = b_o * kept[:, None] + tl.dot(b_w.to(b_v.dtype), b_v, input_precision=PRECISION)
                b_m = b_n
    m_o = m_m[:, None] & (o_v < Dv)[None, :]
    if SPLIT:
        row = (tl.load(blocks + 5 * i_b + 4).to(tl.int64) + o_m // G) * Hq + head
        tl.store(partial + row[:, None] * Dv + o_v[None, :], b_o, mask=m_o)
        tl.store(maxima + row, b_m, mask=m_m)
        tl.store(totals + row, b_l, mask=m_m)
    else:
        p_o = (token.to(tl.int64) * Hq + head)[:, None] * Dv + o_v[None, :]
        b_l = tl.where(m_m, b_l, 1.0)
        tl.store(outputs + p_o, (b_o / b_l[:, None]).to(outputs.dtype.element_ty), mask=m_o)


@triton.jit
def _join_kernel(
    partial, maxima, totals, cu_places, places, outputs, Hq, Dv,
    BDV: tl.constexpr,
):  # fmt: skip
    """One token and head: the partial results of its splits, whose rows stand at `places[cu_places[token]…]`."""
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_v = tl.arange(0, BDV)
    b_m = float("-inf")
    b_l = 0.0
    b_o = tl.zeros([BDV], dtype=tl.float32)
    for i_s in range(tl.load(cu_places + i_t), tl.load(cu_places + i_t + 1)):
        row = tl.load(places + i_s).to(tl.int64) * Hq + i_h
        own = tl.load(maxima + row)
        top = tl.maximum(b_m, own)
        shift = tl.where(top == float("-inf"), 0.0, top)
        old, new = tl.exp2(b_m - shift), tl.exp2(own - shift)
        b_o = b_o * old + tl.load(partial + row * Dv + o_v, mask=o_v < Dv, other=0.0) * new
        b_l = b_l * old + tl.load(totals + row) * new
        b_m = top
    p_o = (i_t * Hq + i_h) * Dv + o_v
    tl.store(outputs + p_o, (b_o / b_l).to(outputs.dtype.element_ty), mask=o_v < Dv)


def _block(channels: int) -> int:
    """The smallest tile that a matrix product takes."""
    return max(16, triton.next_power_of_2(channels))


@dataclass(frozen=True, slots=True)
class _Groups:
    """Rows of all tables and their groups of one base, as columns. cu_splits: splits of every table; split_groups: theirs."""

    base: list[int]
    rows: list[int]
    page: list[int]
    first: list[int]
    count: list[int]
    splits: list[list[range]]


def _group(tables: Sequence[PageTable]) -> _Groups:
    """Cut tables into groups of one base, and groups into splits of about `SPLIT_PAGES` pages."""
    groups = _Groups([], [0], [], [], [], [])
    for table in tables:
        splits: list[range] = []
        begin, pages, base = len(groups.base), 0, None
        for row in table.rows:
            full = pages == SPLIT_PAGES
            if row.base != base or full:
                if base is not None:
                    groups.rows.append(len(groups.page))
                if full:
                    splits.append(range(begin, len(groups.base)))
                    begin, pages = len(groups.base), 0
                groups.base.append(row.base)
                base = row.base
            groups.page.append(row.page)
            groups.first.append(row.first)
            groups.count.append(row.count)
            pages += 1
        groups.rows.append(len(groups.page))
        splits.append(range(begin, len(groups.base)))
        groups.splits.append(splits)
    return groups


@dataclass(frozen=True, slots=True)
class _Work:
    """blocks as `_attend_kernel` reads them; cu_places and places: the partial rows of every token."""

    blocks: list[int]
    cu_places: list[int]
    places: list[int]
    num_partial: int

    @property
    def is_split(self) -> bool:
        """Whether any token has more than one split."""
        return len(self.places) > len(self.cu_places) - 1


def _cut(cu_queries: Sequence[int], groups: _Groups, tokens_a_block: int) -> _Work:
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
    return _Work(blocks, cu_places, places, partial)


@dataclass(frozen=True, slots=True)
class _Launch:
    """What all layers of one pass launch alike: columns of `_Groups` and `_Work` on the device."""

    blocks: torch.Tensor
    group_base: torch.Tensor
    group_rows: torch.Tensor
    row_page: torch.Tensor
    row_first: torch.Tensor
    row_count: torch.Tensor
    cu_places: torch.Tensor
    places: torch.Tensor
    num_partial: int

    @property
    def num_blocks(self) -> int:
        """Programs a key head."""
        return len(self.blocks) // 5


def _launch(asked: PagedQueries, tokens_a_block: int) -> _Launch:
    groups = _group(asked.tables)
    work = _cut(asked.cu_queries, groups, tokens_a_block)
    columns = (
        work.blocks, groups.base, groups.rows, groups.page, groups.first, groups.count, work.cu_places, work.places
    )  # fmt: skip
    # One transfer: a small copy costs what a large one does.
    joined = torch.tensor([value for column in columns for value in column], dtype=torch.int32)
    pieces = joined.to(asked.positions.device).split([len(column) for column in columns])
    blocks, base, rows, page, first, count, cu_places, places = pieces
    num_partial = work.num_partial if work.is_split else 0
    return _Launch(blocks, base, rows, page, first, count, cu_places, places, num_partial)


def attend(
    queries: torch.Tensor, asked: PagedQueries, pools: tuple[torch.Tensor, torch.Tensor], shape: AttentionShape
) -> torch.Tensor:
    """As `naive.attend`, on a GPU; each request's positions must rise, and pages hold a power of two of at least 16 tokens."""
    keys, values = pools
    device, (tokens, query_heads, key_dim) = queries.device, queries.shape
    page_size, kv_heads, value_dim = keys.shape[1], keys.shape[2], values.shape[-1]
    group = query_heads // kv_heads
    tile = max(_block(group), min(TILE_ROWS, _block(group * tokens)))
    launch = asked.prepared.setdefault(f"triton {tile} {group}", None) or _launch(asked, max(1, tile // group))
    asked.prepared[f"triton {tile} {group}"] = launch
    channels = _Channels.of(shape.rotary, key_dim, device)
    outputs = torch.empty(tokens, query_heads, value_dim, dtype=queries.dtype, device=device)
    partial = torch.empty(max(1, launch.num_partial), query_heads, value_dim, dtype=torch.float32, device=device)
    maxima = torch.empty(2, max(1, launch.num_partial), query_heads, dtype=torch.float32, device=device)
    _attend_kernel[(launch.num_blocks, kv_heads)](
        queries.contiguous(), keys, values, asked.positions, channels.frequencies, channels.partners, channels.signs,
        launch.blocks, launch.group_base, launch.group_rows, launch.row_page, launch.row_first, launch.row_count,
        partial, maxima[0], maxima[1], outputs,
        shape.scale * _LOG2_E, query_heads, kv_heads, key_dim, value_dim, keys.stride(2), values.stride(2),
        G=group, PAGE=page_size, BM=tile, BD=_block(key_dim), BDV=_block(value_dim),
        ROTARY=shape.rotary is not None, SPLIT=launch.num_partial > 0, PRECISION="tf32x3",
        num_warps=8 if key_dim > 128 else 4,
    )  # fmt: skip
    if launch.num_partial:
        _join_kernel[(tokens, query_heads)](
            partial, maxima[0], maxima[1], launch.cu_places, launch.places, outputs,
            query_heads, value_dim, BDV=_block(value_dim), num_warps=4,
        )  # fmt: skip
    return outputs


@dataclass(frozen=True, slots=True)
class _Channels:
    """How a head's channels turn: `x cos(pf) + sign · x[partner] sin(pf)`; frequency 0 where a channel is left alone."""

    frequencies: torch.Tensor
    partners: torch.Tensor
    signs: torch.Tensor

    @classmethod
    def of(cls, rotary: Rotary | None, channels: int, device: torch.device) -> "_Channels":
        """Columns `[channels]` of a rotary."""
        frequencies = torch.zeros(channels, device=device)
        partners = torch.arange(channels, dtype=torch.int32, device=device)
        signs = torch.zeros(channels, device=device)
        if rotary is not None:
            half = rotary.frequencies.shape[0]
            if rotary.interleaved:
                frequencies[: 2 * half] = rotary.frequencies.repeat_interleave(2)
                partners[: 2 * half] ^= 1
                signs[: 2 * half] = torch.tensor([-1.0, 1.0], device=device).repeat(half)
            else:
                frequencies[: 2 * half] = rotary.frequencies.repeat(2)
                partners[: 2 * half] = partners[: 2 * half].roll(half)
                signs[: 2 * half] = torch.tensor([-1.0, 1.0], device=device).repeat_interleave(half)
        return cls(frequencies, partners, signs)
