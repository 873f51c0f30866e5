"""Paged attention on a GPU: a program a block of queries, key head and split of the keys; one more launch joins the splits.

The query heads of one key head stand in one tile with their tokens. Pages of one base stand in one group, for which the
tile's queries are rotated once by their distance to the base (design §5), so that stored bytes are read as they are. Full
pages that every query of the tile sees come first in a group and need no mask.
Work is cut on the host into splits of pages, short enough that one request alone keeps the whole chip busy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.ops.columns import send_into
from services.worker.ops.paged_attention.turns import Turns
from services.worker.ops.paged_attention.types import AttentionShape, PagedQueries
from services.worker.ops.paged_attention.work import BLOCK_FIELDS, Tiles, Work, room_for
from services.worker.ops.rotary import Rotary
from services.worker.ops.tiles import block

__all__ = ["FixedLaunch", "attend", "fixed_launches", "partners"]

_LOG2_E = 1.4426950408889634


@triton.jit
def partners(o_d, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of every channel that turns: its frequency, the channel it turns with, and the sign of that one's share."""
    if INTERLEAVED:
        o_f, o_p, sign = o_d // 2, o_d ^ 1, tl.where(o_d % 2 == 0, -1.0, 1.0)
    else:
        is_first = o_d < HALF
        o_f, o_p = o_d % HALF, tl.where(is_first, o_d + HALF, o_d - HALF)
        sign = tl.where(is_first, -1.0, 1.0)
    return o_f, o_p, sign


@triton.jit
def _turned(
    q, query_cos, query_sin, base_cos, base_sin, token, head, m_m, i_g,
    Hq: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The first BR channels of a tile of queries, turned by their distance to a group's base; HALF 0: as they are.

    The angle is a difference of two angles whose cosines and sines are known: no reduction of large angles.
    """
    o_d = tl.arange(0, BR)
    m_q = m_m[:, None] & (o_d < D)[None, :]
    p_q = (token.to(tl.int64) * Hq + head)[:, None] * D
    b_q = tl.load(q + p_q + o_d[None, :], mask=m_q, other=0.0)
    if HALF > 0:
        m_f = o_d < 2 * HALF
        o_f, o_p, sign = partners(o_d, HALF, INTERLEAVED)
        p_f, m_t = token[:, None] * HALF + o_f[None, :], m_m[:, None] & m_f[None, :]
        q_cos, q_sin = tl.load(query_cos + p_f, mask=m_t, other=1.0), tl.load(query_sin + p_f, mask=m_t, other=0.0)
        b_cos = tl.load(base_cos + i_g * HALF + o_f, mask=m_f, other=1.0)[None, :]
        b_sin = tl.load(base_sin + i_g * HALF + o_f, mask=m_f, other=0.0)[None, :]
        b_p = tl.load(q + p_q + o_p[None, :], mask=m_t, other=0.0).to(tl.float32) * sign[None, :]
        turned = b_q.to(tl.float32) * (q_cos * b_cos + q_sin * b_sin) + b_p * (q_sin * b_cos - q_cos * b_sin)
        b_q = turned.to(b_q.dtype)
    return b_q


@triton.jit
def _piece(q, token, head, m_m, begin: tl.constexpr, width: tl.constexpr, Hq: tl.constexpr, D: tl.constexpr):
    """A tile of queries' channels from `begin` on, which do not turn; width 0: of no use."""
    o_d = begin + tl.arange(0, max(16, width))
    m_q = m_m[:, None] & (o_d < D)[None, :]
    return tl.load(q + (token.to(tl.int64) * Hq + head)[:, None] * D + o_d[None, :], mask=m_q, other=0.0)


@triton.jit
def _until(firsts, begin, end, farthest):
    """One past the last place in `[begin, end)` whose first position is not behind the farthest; they stand in rising order."""
    o_r = tl.arange(0, 64)
    stop = begin
    for i_r in range(begin, end, 64):
        m_r = i_r + o_r < end
        first = tl.load(firsts + i_r + o_r, mask=m_r, other=0)
        stop += tl.sum((m_r & (first <= farthest)).to(tl.int32), axis=0)
    return stop


@triton.jit
def _whole_until(firsts, counts, begin, end, nearest, PAGE: tl.constexpr):
    """One past the last of the first places in `[begin, end)` that are full pages at or before the nearest query."""
    o_r = tl.arange(0, 64)
    stop = end
    for i_r in range(begin, end, 64):
        m_r = i_r + o_r < end
        first = tl.load(firsts + i_r + o_r, mask=m_r, other=0)
        count = tl.load(counts + i_r + o_r, mask=m_r, other=PAGE)
        is_cut = m_r & ((count < PAGE) | (first + PAGE - 1 > nearest))
        stop = tl.minimum(stop, tl.min(tl.where(is_cut, i_r + o_r, end), axis=0))
    return stop


@triton.jit
def _stored(p_n, m_n, begin: tl.constexpr, width: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Channels of keys or values from `begin` on; not MASKED: of all of them."""
    o_d = begin + tl.arange(0, width)
    if MASKED or begin + width > D:
        b_n = tl.load(p_n + o_d[None, :], mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)
    else:
        b_n = tl.load(p_n + o_d[None, :])
    return b_n


@triton.jit
def _attend_rows(
    b_q, b_r, b_s, b_m, b_l, b_o, keys, values, row_slot, row_first, row_count, begin, stop, place, farthest, i_h, scale,
    Hkv: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    PAGE: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All steps over rows `[begin, stop)`; not MASKED: every query sees all of their keys, and steps come out even.

    A step takes BN keys: part of a page, or several pages. The loop has no branch, so that loads run ahead.
    """
    o_n = tl.arange(0, BN)
    for i_n in range(begin * PAGE, stop * PAGE, BN):
        if BN <= PAGE:
            i_r, o_p = i_n // PAGE, i_n % PAGE + o_n
            first, count = tl.load(row_first + i_r), tl.load(row_count + i_r)
            slot = tl.load(row_slot + i_r).to(tl.int64)
        else:
            i_r, o_p = i_n // PAGE + o_n // PAGE, o_n % PAGE
            first = tl.load(row_first + i_r, mask=i_r < stop, other=0)
            count = tl.load(row_count + i_r, mask=i_r < stop, other=0)
            slot = tl.load(row_slot + i_r, mask=i_r < stop, other=0).to(tl.int64)
        # Behind the farthest query a page may hold slots that nobody has written: NaN times 0 is NaN.
        m_n = (o_p < count) & (first + o_p <= farthest)
        row = (slot + o_p) * Hkv + i_h
        p_k, p_v = keys + row[:, None] * KEY_STRIDE, values + row[:, None] * VALUE_STRIDE
        b_k = _stored(p_k, m_n, 0, BR, D, MASKED)
        b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if BD > BR:
            b_k = _stored(p_k, m_n, BR, BR, D, MASKED)
            b_x = tl.dot(b_r, tl.trans(b_k), b_x, input_precision=PRECISION)
        if BD > 2 * BR:
            b_k = _stored(p_k, m_n, 2 * BR, 2 * BR, D, MASKED)
            b_x = tl.dot(b_s, tl.trans(b_k), b_x, input_precision=PRECISION)
        if MASKED:
            b_x = tl.where(m_n[None, :] & ((first + o_p)[None, :] <= place[:, None]), b_x, float("-inf"))
        b_n = tl.maximum(b_m, tl.max(b_x, axis=1) * scale)
        # A row that has seen nothing yet keeps a maximum of minus infinity, from which nothing is subtracted.
        shift = tl.where(b_n == float("-inf"), 0.0, b_n) if MASKED else b_n
        b_w = tl.exp2(b_x * scale - shift[:, None])
        kept = tl.exp2(b_m - shift)
        b_l = b_l * kept + tl.sum(b_w, axis=1)
        b_v = _stored(p_v, m_n, 0, BDV, Dv, MASKED)
        b_o = tl.dot(b_w.to(b_v.dtype), b_v, b_o * kept[:, None], input_precision=PRECISION)
        b_m = b_n
    return b_m, b_l, b_o


@triton.jit
def _attend_kernel(
    q, keys, values, positions, query_cos, query_sin, base_cos, base_sin,
    blocks, group_rows, row_slot, row_first, row_count, cu_partial,
    partial, maxima, totals, outputs, scale,
    Hq: tl.constexpr, Hkv: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    G: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One program of `blocks` (see `BLOCK_FIELDS`) and one key head. A block in one split writes its outputs at once.

    Only BR channels turn with a group; the others stay in place for all groups.
    """
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_begin, q_end = tl.load(blocks + FIELDS * i_b), tl.load(blocks + FIELDS * i_b + 1)
    o_m, o_v = tl.arange(0, BM), tl.arange(0, BDV)
    token = q_begin + o_m // G
    head = i_h * G + o_m % G
    m_m = token < q_end
    place = tl.load(positions + token, mask=m_m, other=-1).to(tl.int32)
    nearest = tl.load(positions + q_begin, mask=q_begin < q_end, other=-1).to(tl.int32)
    farthest = tl.load(positions + q_end - 1).to(tl.int32)
    b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BM], dtype=tl.float32)
    b_o = tl.zeros([BM, BDV], dtype=tl.float32)
    b_r = _piece(q, token, head, m_m, BR, BR if BD > BR else 0, Hq, D)
    b_s = _piece(q, token, head, m_m, 2 * BR, 2 * BR if BD > 2 * BR else 0, Hq, D)
    first_row, last_row = tl.load(blocks + FIELDS * i_b + 4), tl.load(blocks + FIELDS * i_b + 5)
    for i_g in range(tl.load(blocks + FIELDS * i_b + 2), tl.load(blocks + FIELDS * i_b + 3)):
        b_q = _turned(
            q, query_cos, query_sin, base_cos, base_sin, token, head, m_m, i_g, Hq, D, BR, HALF, INTERLEAVED
        )  # fmt: skip
        begin = tl.maximum(tl.load(group_rows + i_g), first_row)
        stop = _until(row_first, begin, tl.minimum(tl.load(group_rows + i_g + 1), last_row), farthest)
        whole = _whole_until(row_first, row_count, begin, stop, nearest, PAGE)
        if BN > PAGE:
            whole = begin + (whole - begin) // (BN // PAGE) * (BN // PAGE)
        b_m, b_l, b_o = _attend_rows(
            b_q, b_r, b_s, b_m, b_l, b_o, keys, values, row_slot, row_first, row_count, begin, whole, place, farthest,
            i_h, scale, Hkv, D, Dv, KEY_STRIDE, VALUE_STRIDE, PAGE, BN, BR, BD, BDV, False, PRECISION,
        )  # fmt: skip
        b_m, b_l, b_o = _attend_rows(
            b_q, b_r, b_s, b_m, b_l, b_o, keys, values, row_slot, row_first, row_count, whole, stop, place, farthest,
            i_h, scale, Hkv, D, Dv, KEY_STRIDE, VALUE_STRIDE, PAGE, BN, BR, BD, BDV, True, PRECISION,
        )  # fmt: skip
    m_o = m_m[:, None] & (o_v < Dv)[None, :]
    if SPLIT:
        is_part = tl.load(blocks + FIELDS * i_b + 7) > 1
        row = tl.load(cu_partial + token, mask=m_m, other=0) + tl.load(blocks + FIELDS * i_b + 6)
        row = row.to(tl.int64) * Hq + head
        tl.store(partial + row[:, None] * Dv + o_v[None, :], b_o, mask=m_o & is_part)
        tl.store(maxima + row, b_m, mask=m_m & is_part)
        tl.store(totals + row, b_l, mask=m_m & is_part)
        m_o = m_o & (is_part == 0)
    p_o = (token.to(tl.int64) * Hq + head)[:, None] * Dv + o_v[None, :]
    b_l = tl.where(m_m & (b_l > 0.0), b_l, 1.0)
    tl.store(outputs + p_o, (b_o / b_l[:, None]).to(outputs.dtype.element_ty), mask=m_o)


@triton.jit
def _join_kernel(
    partial, maxima, totals, cu_partial, outputs,
    Hq: tl.constexpr, Dv: tl.constexpr, BS: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """One token, head and block of channels: the partial results of its splits; nothing where its block is not split."""
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_v = tl.arange(0, BS), tl.program_id(2) * BDV + tl.arange(0, BDV)
    begin, end = tl.load(cu_partial + i_t), tl.load(cu_partial + i_t + 1)
    b_m = float("-inf")
    b_l = tl.where(begin < end, 0.0, 1.0)
    b_o = tl.zeros([BDV], dtype=tl.float32)
    for i_s in range(begin, end, BS):
        m_s = i_s + o_s < end
        row = (i_s + o_s).to(tl.int64) * Hq + i_h
        own = tl.load(maxima + row, mask=m_s, other=float("-inf"))
        top = tl.maximum(b_m, tl.max(own, axis=0))
        shift = tl.where(top == float("-inf"), 0.0, top)
        old, new = tl.exp2(b_m - shift), tl.exp2(own - shift)
        m_o = m_s[:, None] & (o_v < Dv)[None, :]
        b_p = tl.load(partial + row[:, None] * Dv + o_v[None, :], mask=m_o, other=0.0)
        b_o = b_o * old + tl.sum(b_p * new[:, None], axis=0)
        b_l = b_l * old + tl.sum(tl.load(totals + row, mask=m_s, other=0.0) * new, axis=0)
        b_m = top
    p_o = (i_t * Hq + i_h) * Dv + o_v
    tl.store(outputs + p_o, (b_o / b_l).to(outputs.dtype.element_ty), mask=(o_v < Dv) & (begin < end))


@dataclass(frozen=True, slots=True)
class _Launch:
    """What all layers of one pass launch alike: the columns of `Work` on the device."""

    tiles: Tiles
    num_partial: int
    blocks: torch.Tensor
    group_base: torch.Tensor
    group_rows: torch.Tensor
    row_slot: torch.Tensor
    row_first: torch.Tensor
    row_count: torch.Tensor
    cu_partial: torch.Tensor

    @property
    def num_blocks(self) -> int:
        """Programs a key head."""
        return len(self.blocks) // BLOCK_FIELDS

    @classmethod
    def of(cls, asked: PagedQueries, tiles: Tiles) -> "_Launch":
        """Cut the work on the host and send it in one transfer: a small copy costs what a large one does."""
        work = Work.cut(asked, tiles)
        sizes = tuple(len(column) for column in work.columns)
        return cls.over(tiles, work.num_partial, work.joined(sizes).to(asked.positions.device), sizes)

    @classmethod
    def over(cls, tiles: Tiles, num_partial: int, joined: torch.Tensor, sizes: Sequence[int]) -> "_Launch":
        """Views of columns that lie one behind the other."""
        return cls(tiles, num_partial, *joined.split(list(sizes)))


class FixedLaunch:
    """A launch whose tensors stay where they are, for passes that are recorded once and replayed.

    Columns have room to grow; `refresh` says where they have outgrown it.
    """

    def __init__(self, asked: PagedQueries, tiles: Tiles) -> None:
        work = Work.cut(asked, tiles)
        self._tiles = tiles
        # The last column has a number for every query that there is room for, and one more.
        least = [0] * (len(work.columns) - 1) + [room_for(len(asked.positions))]
        self._sizes = tuple(max(room_for(len(column)), size) for column, size in zip(work.columns, least, strict=True))
        # Without partial results the recorded launch has no second kernel.
        self._num_partial = room_for(work.num_partial) if work.num_partial else 0
        self._joined = torch.empty(sum(self._sizes), dtype=torch.int32, device=asked.positions.device)
        self.launch = _Launch.over(tiles, self._num_partial, self._joined, self._sizes)
        self._send(work)

    def refresh(self, asked: PagedQueries) -> bool:
        """Take over what the tables say now; False, with nothing changed, where there is no room for it."""
        work = Work.cut(asked, self._tiles)
        fits = all(len(column) <= size for column, size in zip(work.columns, self._sizes, strict=True))
        if not fits or work.num_partial > self._num_partial:
            return False
        self._send(work)
        return True

    def _send(self, work: Work) -> None:
        send_into(self._joined, work.joined(self._sizes))


def fixed_launches(asked: PagedQueries) -> dict[str, FixedLaunch]:
    """What a pass over fixed queries has prepared and a recorded one goes on with."""
    return {key: prepared for key, prepared in asked.prepared.items() if isinstance(prepared, FixedLaunch)}


def _prepare(key: str, asked: PagedQueries, queries: torch.Tensor, keys: torch.Tensor) -> _Launch:
    if asked.is_fixed:
        return asked.prepare(key, lambda: FixedLaunch(asked, Tiles.of(asked, queries, keys))).launch
    return asked.prepare(key, lambda: _Launch.of(asked, Tiles.of(asked, queries, keys)))


def attend(
    queries: torch.Tensor, asked: PagedQueries, pools: tuple[torch.Tensor, torch.Tensor], shape: AttentionShape
) -> torch.Tensor:
    """As `naive.attend`, on a GPU; each request's positions must rise, and a page holds a power of two of tokens."""
    keys, values = pools
    device, (tokens, heads, key_dim), value_dim = queries.device, queries.shape, values.shape[-1]
    key = f"triton {heads} {key_dim} {keys.shape[1:3]} {queries.itemsize}"
    launch = _prepare(key, asked, queries, keys)
    own = Turns.of_queries(asked, shape.rotary)
    bases = Turns.once(asked, shape.rotary, key, lambda: launch.group_base)
    outputs = torch.empty(tokens, heads, value_dim, dtype=queries.dtype, device=device)
    partial = torch.empty(max(1, launch.num_partial), heads, value_dim, dtype=torch.float32, device=device)
    sums = torch.empty(2, max(1, launch.num_partial), heads, dtype=torch.float32, device=device)
    _attend_kernel[(launch.num_blocks, keys.shape[2])](
        queries.contiguous(), keys, values, asked.positions,
        own.cos, own.sin, bases.cos, bases.sin,
        launch.blocks, launch.group_rows, launch.row_slot, launch.row_first, launch.row_count, launch.cu_partial,
        partial, sums[0], sums[1], outputs, shape.scale * _LOG2_E,
        Hq=heads, Hkv=keys.shape[2], D=key_dim, Dv=value_dim, KEY_STRIDE=keys.stride(2), VALUE_STRIDE=values.stride(2),
        G=heads // keys.shape[2], PAGE=keys.shape[1], BM=launch.tiles.rows, BN=_step_keys(queries, key_dim),
        BR=_turning_channels(key_dim, shape.rotary), BD=block(key_dim), BDV=block(value_dim),
        HALF=0 if shape.rotary is None else shape.rotary.half,
        INTERLEAVED=shape.rotary is not None and shape.rotary.interleaved,
        SPLIT=launch.num_partial > 0, PRECISION="tf32x3", FIELDS=BLOCK_FIELDS,
        num_warps=_warps(queries, launch.tiles.rows * block(key_dim)), num_stages=2,
    )  # fmt: skip
    if launch.num_partial:
        # Few splits are read at once with all channels; many need programs to share the channels of one token.
        splits = 16 if launch.num_partial <= 32 * tokens else 64
        width = min(4096 // splits, block(value_dim))
        _join_kernel[(tokens, heads, triton.cdiv(value_dim, width))](
            partial, sums[0], sums[1], launch.cu_partial, outputs,
            Hq=heads, Dv=value_dim, BS=splits, BDV=width, num_warps=4,
        )  # fmt: skip
    return outputs


def _turning_channels(key_dim: int, rotary: Rotary | None) -> int:
    """Channels of the tile that turns: a power of two that holds those of the rotary, a quarter of a head at least.

    Its products with keys and those of the rest are apart, so that a group of pages turns no more than it must.
    """
    whole = block(key_dim)
    if rotary is None or whole != key_dim:
        return whole
    return min(whole, max(whole // 4, block(2 * rotary.half)))


def _warps(queries: torch.Tensor, tile: int) -> int:
    """Warps of a program over so many channels of a tile of queries.

    Triton 3.6 reads outside of shared memory where eight warps take fp32 products of 64 rows.
    """
    return 8 if tile >= 128 * 128 and queries.itemsize == 2 else 4


def _step_keys(queries: torch.Tensor, key_dim: int) -> int:
    """Keys of one step, so that two steps of keys and values fit in shared memory; fp32 enters products as two halves."""
    size = queries.itemsize if queries.itemsize == 2 else 2 * queries.itemsize
    return max(16, min(64, 32768 // (size * block(key_dim))))
