"""Paged attention over latents on a GPU: a key is `[positional | latent]`, and its latent is the value too.

All query heads meet the same keys, so a tile of queries is as many heads of one token as it holds, then further tokens. A
step loads its latents once for both products. Work is cut as in `triton`, with tiles of heads for key heads.
"""

import torch
import triton
import triton.language as tl

from services.worker.ops.paged_attention.launch import prepare
from services.worker.ops.paged_attention.triton_tiles import LOG2_E, Partials, piece, stored, turned, until, whole_until
from services.worker.ops.paged_attention.turns import Turns
from services.worker.ops.paged_attention.types import AttentionShape, PagedQueries
from services.worker.ops.paged_attention.work import BLOCK_FIELDS, HeadTiles
from services.worker.ops.tiles import block

__all__ = ["attend", "fits"]

# What a tile of queries and two steps of keys have room for in shared memory.
_WIDEST_LATENT, _WIDEST_POSITION = 512, 64
# Outputs of more rows would not fit in registers; fewer rows take slower products.
_ROWS = 64
_FP32_ROWS = 16


@triton.jit
def _attend_rows(
    b_q, b_a, b_m, b_l, b_o, keys, row_slot, row_first, row_count, begin, stop, place, farthest, scale,
    R: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All steps over rows `[begin, stop)`; not MASKED: every query sees all of their keys, and steps come out even."""
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
        p_k = keys + (slot + o_p)[:, None] * STRIDE
        b_c = stored(p_k + R, m_n, 0, BC, C, MASKED)
        b_x = tl.dot(b_a, tl.trans(b_c), input_precision=PRECISION)
        b_x = tl.dot(b_q, tl.trans(stored(p_k, m_n, 0, BR, R, MASKED)), b_x, input_precision=PRECISION)
        if MASKED:
            b_x = tl.where(m_n[None, :] & ((first + o_p)[None, :] <= place[:, None]), b_x, float("-inf"))
        b_n = tl.maximum(b_m, tl.max(b_x, axis=1) * scale)
        # A row that has seen nothing yet keeps a maximum of minus infinity, from which nothing is subtracted.
        shift = tl.where(b_n == float("-inf"), 0.0, b_n) if MASKED else b_n
        b_w = tl.exp2(b_x * scale - shift[:, None])
        kept = tl.exp2(b_m - shift)
        b_l = b_l * kept + tl.sum(b_w, axis=1)
        b_o = tl.dot(b_w.to(b_c.dtype), b_c, b_o * kept[:, None], input_precision=PRECISION)
        b_m = b_n
    return b_m, b_l, b_o


@triton.jit
def _attend_kernel(
    q, keys, positions, query_cos, query_sin, base_cos, base_sin,
    blocks, group_rows, row_slot, row_first, row_count, cu_partial,
    partial, maxima, totals, outputs, scale,
    Hq: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """One program of `blocks` (see `BLOCK_FIELDS`) and G heads. A block in one split writes its outputs at once."""
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_begin, q_end = tl.load(blocks + FIELDS * i_b), tl.load(blocks + FIELDS * i_b + 1)
    o_m, o_c = tl.arange(0, BM), tl.arange(0, BC)
    token = q_begin + o_m // G
    head = i_h * G + o_m % G
    m_m = token < q_end
    place = tl.load(positions + token, mask=m_m, other=-1).to(tl.int32)
    nearest = tl.load(positions + q_begin, mask=q_begin < q_end, other=-1).to(tl.int32)
    farthest = tl.load(positions + q_end - 1).to(tl.int32)
    b_m = tl.full([BM], float("-inf"), dtype=tl.float32)
    b_l = tl.zeros([BM], dtype=tl.float32)
    b_o = tl.zeros([BM, BC], dtype=tl.float32)
    b_a = piece(q, token, head, m_m, R, BC, Hq, R + C)
    first_row, last_row = tl.load(blocks + FIELDS * i_b + 4), tl.load(blocks + FIELDS * i_b + 5)
    for i_g in range(tl.load(blocks + FIELDS * i_b + 2), tl.load(blocks + FIELDS * i_b + 3)):
        b_q = turned(
            q, query_cos, query_sin, base_cos, base_sin, token, head, m_m, i_g, Hq, R + C, R, BR, HALF, INTERLEAVED
        )  # fmt: skip
        begin = tl.maximum(tl.load(group_rows + i_g), first_row)
        stop = until(row_first, begin, tl.minimum(tl.load(group_rows + i_g + 1), last_row), farthest)
        whole = whole_until(row_first, row_count, begin, stop, nearest, PAGE)
        if BN > PAGE:
            whole = begin + (whole - begin) // (BN // PAGE) * (BN // PAGE)
        b_m, b_l, b_o = _attend_rows(
            b_q, b_a, b_m, b_l, b_o, keys, row_slot, row_first, row_count, begin, whole, place, farthest, scale,
            R, C, STRIDE, PAGE, BN, BR, BC, False, PRECISION,
        )  # fmt: skip
        b_m, b_l, b_o = _attend_rows(
            b_q, b_a, b_m, b_l, b_o, keys, row_slot, row_first, row_count, whole, stop, place, farthest, scale,
            R, C, STRIDE, PAGE, BN, BR, BC, True, PRECISION,
        )  # fmt: skip
    m_o = m_m[:, None] & (o_c < C)[None, :]
    if SPLIT:
        is_part = tl.load(blocks + FIELDS * i_b + 7) > 1
        row = tl.load(cu_partial + token, mask=m_m, other=0) + tl.load(blocks + FIELDS * i_b + 6)
        row = row.to(tl.int64) * Hq + head
        tl.store(partial + row[:, None] * C + o_c[None, :], b_o, mask=m_o & is_part)
        tl.store(maxima + row, b_m, mask=m_m & is_part)
        tl.store(totals + row, b_l, mask=m_m & is_part)
        m_o = m_o & (is_part == 0)
    p_o = (token.to(tl.int64) * Hq + head)[:, None] * C + o_c[None, :]
    b_l = tl.where(m_m & (b_l > 0.0), b_l, 1.0)
    tl.store(outputs + p_o, (b_o / b_l[:, None]).to(outputs.dtype.element_ty), mask=m_o)


def fits(key_dim: int, latent_dim: int) -> bool:
    """Whether a tile holds latents of so many channels, and the positional channels of keys beside them."""
    return latent_dim <= _WIDEST_LATENT and key_dim - latent_dim <= _WIDEST_POSITION


def attend(
    queries: torch.Tensor, asked: PagedQueries, pools: tuple[torch.Tensor, torch.Tensor], shape: AttentionShape
) -> torch.Tensor:
    """As `naive.attend`, on a GPU, of pools whose values are the last channels of their keys; see `triton.attend`."""
    keys, values = pools
    (tokens, heads, key_dim), (_, page_size, _, latent_dim) = queries.shape, values.shape
    is_half = queries.itemsize == 2
    tiles = _head_tiles(heads, is_half)
    key = f"triton latent {heads} {key_dim} {page_size} {queries.itemsize}"
    launch = prepare(key, asked, tiles, page_size)
    own = Turns.of_queries(asked, shape.rotary)
    bases = Turns.once(asked, shape.rotary, key, lambda: launch.group_base)
    outputs = torch.empty(tokens, heads, latent_dim, dtype=queries.dtype, device=queries.device)
    partials = Partials.of(launch, outputs)
    positional = key_dim - latent_dim
    _attend_kernel[(launch.num_blocks, tiles.count)](
        queries.contiguous(), keys, asked.positions,
        own.cos, own.sin, bases.cos, bases.sin,
        launch.blocks, launch.group_rows, launch.row_slot, launch.row_first, launch.row_count, launch.cu_partial,
        partials.outputs, partials.maxima, partials.totals, outputs, shape.scale * LOG2_E,
        Hq=heads, R=positional, C=latent_dim, STRIDE=keys.stride(1), G=tiles.group, PAGE=page_size,
        BM=launch.tiles.rows, BN=64 if is_half else 16, BR=block(positional), BC=block(latent_dim),
        HALF=0 if shape.rotary is None else shape.rotary.half,
        INTERLEAVED=shape.rotary is not None and shape.rotary.interleaved,
        SPLIT=launch.num_partial > 0, PRECISION="tf32x3", FIELDS=BLOCK_FIELDS,
        num_warps=8 if is_half else 4, num_stages=2,
    )  # fmt: skip
    partials.join(launch, outputs)
    return outputs


def _head_tiles(heads: int, is_half: bool) -> HeadTiles:
    """As many heads a tile as divide them all: most heads are a power of two."""
    rows = _ROWS if is_half else _FP32_ROWS
    group = max(size for size in range(1, min(heads, rows) + 1) if heads % size == 0)
    return HeadTiles(group, heads // group, rows, _ROWS if is_half else 16)
