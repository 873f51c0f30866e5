"""Storing tokens on a GPU: one launch, which reads every key and value once."""

import torch
import triton
import triton.language as tl

from services.worker.ops.page_store.types import FreshTokens, KeyForm
from services.worker.ops.paged_attention import PagedQueries
from services.worker.ops.paged_attention.triton_tiles import partners
from services.worker.ops.paged_attention.turns import Turns

__all__ = ["store"]

_TILE = 2048


@triton.jit
def _store_kernel(
    keys, values, slots, weight, cos, sin, key_pool, value_pool, rows, eps,
    key_outer_stride, key_inner_stride, value_outer_stride, value_inner_stride,
    Hkv: tl.constexpr, D: tl.constexpr, Dv: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr, VALUED: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """A block of heads of tokens. Norm and rotation are in fp32; a key is rounded once, where it is stored."""
    o_r, o_d = (tl.program_id(0) * BR + tl.arange(0, BR)).to(tl.int64), tl.arange(0, BD)
    token, head, m_r = o_r // Hkv, o_r % Hkv, o_r < rows
    slot = tl.load(slots + token, mask=m_r, other=-1).to(tl.int64)
    m_r &= slot >= 0
    row = slot * Hkv + head
    p_k, m_k = (token * key_outer_stride + head * key_inner_stride)[:, None], m_r[:, None] & (o_d < D)[None, :]
    b_k = tl.load(keys + p_k + o_d[None, :], mask=m_k, other=0.0).to(tl.float32)
    if NORMED:
        b_r = tl.rsqrt(tl.sum(b_k * b_k, axis=1) / D + eps)[:, None]
        b_k *= b_r * tl.load(weight + o_d, mask=o_d < D, other=0.0)[None, :]
    if HALF > 0:
        o_f, o_p, sign = partners(o_d, HALF, INTERLEAVED)
        m_f = o_d < 2 * HALF
        m_t, p_f = m_r[:, None] & m_f[None, :], token[:, None] * HALF + o_f[None, :]
        b_p = tl.load(keys + p_k + o_p[None, :], mask=m_t, other=0.0).to(tl.float32) * sign[None, :]
        if NORMED:
            b_p *= b_r * tl.load(weight + o_p, mask=m_f, other=0.0)[None, :]
        b_c, b_s = tl.load(cos + p_f, mask=m_t, other=1.0), tl.load(sin + p_f, mask=m_t, other=0.0)
        b_k = b_k * b_c + b_p * b_s
    tl.store(key_pool + row[:, None] * KEY_STRIDE + o_d[None, :], b_k.to(key_pool.dtype.element_ty), mask=m_k)
    if VALUED:
        o_v = tl.arange(0, BDV)
        m_v = m_r[:, None] & (o_v < Dv)[None, :]
        p_v = (token * value_outer_stride + head * value_inner_stride)[:, None] + o_v[None, :]
        b_v = tl.load(values + p_v, mask=m_v, other=0.0)
        tl.store(value_pool + row[:, None] * VALUE_STRIDE + o_v[None, :], b_v.to(value_pool.dtype.element_ty), mask=m_v)


def store(
    tokens: FreshTokens, asked: PagedQueries, base: int, pools: tuple[torch.Tensor, torch.Tensor], form: KeyForm
) -> None:
    """As `naive.store`."""
    keys = _with_dense_heads(tokens.keys)
    values = keys if tokens.values is None else _with_dense_heads(tokens.values)
    (num_tokens, heads, key_dim), value_dim = keys.shape, values.shape[-1]
    turns, rotary = Turns.of_queries(asked, form.rotary, base), form.rotary
    key_block, value_block = (triton.next_power_of_2(channels) for channels in (key_dim, value_dim))
    rows = max(1, _TILE // max(key_block, value_block))
    _store_kernel[(triton.cdiv(num_tokens * heads, rows),)](
        keys, values, tokens.slots, keys if form.norm is None else form.norm.weight, turns.cos, turns.sin,
        *pools, num_tokens * heads, 0.0 if form.norm is None else form.norm.eps,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        Hkv=heads, D=key_dim, Dv=value_dim, KEY_STRIDE=pools[0].stride(2), VALUE_STRIDE=pools[1].stride(2),
        HALF=0 if rotary is None else rotary.half, INTERLEAVED=rotary is not None and rotary.interleaved,
        NORMED=form.norm is not None, VALUED=tokens.values is not None,
        BR=rows, BD=key_block, BDV=value_block, num_warps=4,
    )  # fmt: skip


def _with_dense_heads(heads: torch.Tensor) -> torch.Tensor:
    """Channels next to each other; heads and tokens may stand apart, as in a wider projection."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()
