"""End states of stored bodies turned to where their bodies stand in a prompt, for families whose keys carry position."""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from services.worker.ops.layout import BodyAddresses
from services.worker.ops.paged_attention.triton_tiles import partners
from services.worker.ops.recurrence.triton_carry import fp32_at
from services.worker.ops.rotary import Rotary
from services.worker.ops.tiles import block

__all__ = ["turn_bodies"]

_COLUMNS = 32


@triton.jit
def _turn_kernel(
    table, positions, frequencies, outputs, turned_table, begin, count,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One body, head and block of columns; address zero is room that no body is in. begin: the address of the outputs.

    Whole turns are taken off in fp64, so that far positions turn as exactly as near ones.
    """
    i_n, i_h, i_v = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    o_f, o_p, sign = partners(o_k, HALF, INTERLEAVED)
    end, m_t = tl.load(table + count + i_n), o_k < 2 * HALF
    m_x = (o_k < K)[:, None] & (o_v < V)[None, :] & (end != 0)
    home = fp32_at(end, ALIGNED) + i_h * K * V
    b_x = tl.load(home + o_k[:, None] * V + o_v[None, :], mask=m_x, other=0.0)
    b_p = tl.load(home + o_p[:, None] * V + o_v[None, :], mask=m_x & m_t[:, None], other=0.0)
    turns = tl.load(frequencies + o_f, mask=m_t, other=0.0).to(tl.float64) * tl.load(positions + i_n).to(tl.float64)
    turns *= tl.full([BK], 0.15915494309189535, tl.float64)
    angle = (turns - tl.floor(turns)).to(tl.float32) * 6.283185307179586
    b_y = b_x * tl.cos(angle)[:, None] + b_p * (sign * tl.sin(angle))[:, None]
    at_output = outputs + (i_n * H + i_h) * K * V
    tl.store(at_output + o_k[:, None] * V + o_v[None, :], b_y, mask=(o_k < K)[:, None] & (o_v < V)[None, :])
    if (i_h == 0) & (i_v == 0):
        tl.store(turned_table + i_n, tl.load(table + i_n))
        tl.store(turned_table + count + i_n, begin + i_n * (4 * H * K * V))


def turn_bodies(addresses: BodyAddresses, rotary: Rotary, states: torch.Tensor) -> BodyAddresses:
    """Bodies of one layer, moved to their positions; states `[slots, H, K, V]` say of which shape they are.

    Raises:
        ValueError: nothing says where the bodies stand.
    """
    if addresses.positions is None:
        raise ValueError("bodies of keys with position lack their positions")
    count, (heads, key_dim, value_dim) = addresses.table.shape[1], states.shape[1:]
    turned = torch.empty(count, heads, key_dim, value_dim, device=states.device)
    table = torch.empty(2, count, dtype=torch.int64, device=states.device)
    width = min(_COLUMNS, block(value_dim))
    _turn_kernel[(count, heads, triton.cdiv(value_dim, width))](
        addresses.table, addresses.positions, rotary.frequencies, turned, table, turned.data_ptr(), count,
        H=heads, K=key_dim, V=value_dim, BK=block(key_dim), BV=width,
        HALF=rotary.half, INTERLEAVED=rotary.interleaved,
        ALIGNED=addresses.is_aligned and key_dim % 4 == 0 and value_dim % 4 == 0, num_warps=4,
    )  # fmt: skip
    return replace(addresses, table=table, turned=turned)
