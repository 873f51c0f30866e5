"""Paged attention on a GPU: a program a block of queries, key head and split of the keys; one more launch joins the splits.

The query heads of one key head stand in one tile with their tokens. Pages of one base stand in one group, for which the
tile's queries are rotated once by their distance to the base (design §5), so that stored bytes are read as they are. Full
pages that every query of the tile sees come first in a group and need no mask.
Work is cut on the host into splits of pages, short enough that one request alone keeps the whole chip busy.
"""

import torch
import triton
import triton.language as tl

from services.worker.ops.paged_attention.launch import prepare
from services.worker.ops.paged_attention.triton_tiles import LOG2_E, Partials, piece, stored, turned, until, whole_until
from services.worker.ops.paged_attention.turns import Turns
from services.worker.ops.paged_attention.types import AttentionShape, PagedQueries
from services.worker.ops.paged_attention.work import BLOCK_FIELDS, HeadTiles
from services.worker.ops.rotary import Rotary
from services.worker.ops.tiles import block

__all__ = ["attend"]


@triton.jit
def _attend_rows(
    b_q, b_r, b_s, b_m, b_l, b_o, keys, values, row_slot, row_first, row_count, begin, stop, place, farthest, i_h, scale,
    Hkv: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    PAGE: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, BDV: tl.constexpr,
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
        b_k = stored(p_k, m_n, 0, BR, D, MASKED)
        b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if BS > 0:
            b_k = stored(p_k, m_n, BR, BS, D, MASKED)
            b_x = tl.dot(b_r, tl.trans(b_k), b_x, input_precision=PRECISION)
        if BT > 0:
            b_k = stored(p_k, m_n, BR + BS, BT, D, MASKED)
            b_x = tl.dot(b_s, tl.trans(b_k), b_x, input_precision=PRECISION)
        if MASKED:
            b_x = tl.where(m_n[None, :] & ((first + o_p)[None, :] <= place[:, None]), b_x, float("-inf"))
        b_n = tl.maximum(b_m, tl.max(b_x, axis=1) * scale)
        # A row that has seen nothing yet keeps a maximum of minus infinity, from which nothing is subtracted.
        shift = tl.where(b_n == float("-inf"), 0.0, b_n) if MASKED else b_n
        b_w = tl.exp2(b_x * scale - shift[:, None])
        kept = tl.exp2(b_m - shift)
        b_l = b_l * kept + tl.sum(b_w, axis=1)
        b_v = stored(p_v, m_n, 0, BDV, Dv, MASKED)
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
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, BDV: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One program of `blocks` (see `BLOCK_FIELDS`) and one key head. A block in one split writes its outputs at once.

    Only BR channels turn with a group; the others, BS and then BT of them, stay in place for all groups.
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
    b_r = piece(q, token, head, m_m, BR, BS, Hq, D)
    b_s = piece(q, token, head, m_m, BR + BS, BT, Hq, D)
    first_row, last_row = tl.load(blocks + FIELDS * i_b + 4), tl.load(blocks + FIELDS * i_b + 5)
    for i_g in range(tl.load(blocks + FIELDS * i_b + 2), tl.load(blocks + FIELDS * i_b + 3)):
        b_q = turned(
            q, query_cos, query_sin, base_cos, base_sin, token, head, m_m, i_g, Hq, D, D, BR, HALF, INTERLEAVED
        )  # fmt: skip
        begin = tl.maximum(tl.load(group_rows + i_g), first_row)
        stop = until(row_first, begin, tl.minimum(tl.load(group_rows + i_g + 1), last_row), farthest)
        whole = whole_until(row_first, row_count, begin, stop, nearest, PAGE)
        if BN > PAGE:
            whole = begin + (whole - begin) // (BN // PAGE) * (BN // PAGE)
        b_m, b_l, b_o = _attend_rows(
            b_q, b_r, b_s, b_m, b_l, b_o, keys, values, row_slot, row_first, row_count, begin, whole, place, farthest,
            i_h, scale, Hkv, D, Dv, KEY_STRIDE, VALUE_STRIDE, PAGE, BN, BR, BS, BT, BDV, False, PRECISION,
        )  # fmt: skip
        b_m, b_l, b_o = _attend_rows(
            b_q, b_r, b_s, b_m, b_l, b_o, keys, values, row_slot, row_first, row_count, whole, stop, place, farthest,
            i_h, scale, Hkv, D, Dv, KEY_STRIDE, VALUE_STRIDE, PAGE, BN, BR, BS, BT, BDV, True, PRECISION,
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


def attend(
    queries: torch.Tensor, asked: PagedQueries, pools: tuple[torch.Tensor, torch.Tensor], shape: AttentionShape
) -> torch.Tensor:
    """As `naive.attend`, on a GPU; each request's positions must rise, and a page holds a power of two of tokens."""
    keys, values = pools
    (tokens, heads, key_dim), (_, page_size, kv_heads, value_dim) = queries.shape, values.shape
    key = f"triton {heads} {key_dim} {keys.shape[1:3]} {queries.itemsize}"
    rows = 128 if queries.itemsize == 2 and key_dim <= 256 else 64
    launch = prepare(key, asked, HeadTiles(heads // kv_heads, kv_heads, rows), page_size)
    own = Turns.of_queries(asked, shape.rotary)
    bases = Turns.once(asked, shape.rotary, key, lambda: launch.group_base)
    outputs = torch.empty(tokens, heads, value_dim, dtype=queries.dtype, device=queries.device)
    partials = Partials.of(launch, outputs)
    turning, second, third = _pieces(key_dim, shape.rotary)
    _attend_kernel[(launch.num_blocks, kv_heads)](
        queries.contiguous(), keys, values, asked.positions,
        own.cos, own.sin, bases.cos, bases.sin,
        launch.blocks, launch.group_rows, launch.row_slot, launch.row_first, launch.row_count, launch.cu_partial,
        partials.outputs, partials.maxima, partials.totals, outputs, shape.scale * LOG2_E,
        Hq=heads, Hkv=kv_heads, D=key_dim, Dv=value_dim, KEY_STRIDE=keys.stride(2), VALUE_STRIDE=values.stride(2),
        G=heads // kv_heads, PAGE=page_size, BM=launch.tiles.rows, BN=_step_keys(queries, key_dim),
        BR=turning, BS=second, BT=third, BDV=block(value_dim),
        HALF=0 if shape.rotary is None else shape.rotary.half,
        INTERLEAVED=shape.rotary is not None and shape.rotary.interleaved,
        SPLIT=launch.num_partial > 0, PRECISION="tf32x3", FIELDS=BLOCK_FIELDS,
        num_warps=_warps(queries, launch.tiles.rows * block(key_dim)), num_stages=2,
    )  # fmt: skip
    partials.join(launch, outputs)
    return outputs


def _pieces(key_dim: int, rotary: Rotary | None) -> tuple[int, int, int]:
    """Channels of the tile that turns, and of two that do not: powers of two that hold a key with the least to spare.

    Products of the pieces with keys are apart, so that a group of pages turns no more than it must: the channels of the
    rotary, a quarter of a head at least.
    """
    whole, rotary_block = block(key_dim), 0 if rotary is None else block(2 * rotary.half)
    quarter = whole // 4
    if key_dim == 3 * quarter and max(16, rotary_block) <= quarter:
        return quarter, 2 * quarter, 0
    turning = max(quarter, rotary_block)
    if rotary is None or whole != key_dim or turning >= whole:
        return whole, 0, 0
    return turning, turning, whole - 2 * turning


def _warps(queries: torch.Tensor, tile: int) -> int:
    """Warps of a program over so many channels of a tile of queries.

    Triton 3.6 reads outside of shared memory where eight warps take fp32 products of 64 rows.
    """
    return 8 if tile >= 128 * 128 and queries.itemsize == 2 else 4


def _step_keys(queries: torch.Tensor, key_dim: int) -> int:
    """Keys of one step, so that two steps of keys and values fit in shared memory; fp32 enters products as two halves."""
    size = queries.itemsize if queries.itemsize == 2 else 2 * queries.itemsize
    return max(16, min(64, 32768 // (size * block(key_dim))))
