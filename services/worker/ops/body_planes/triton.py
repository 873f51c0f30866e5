"""The op on a GPU: one launch for all bodies of a layer, found and left by their addresses."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from services.worker.ops.body_planes.types import BodyPlanes, PassedBody
from services.worker.ops.columns import send_into
from services.worker.ops.layout import BODY_ALIGNMENT
from services.worker.ops.tiles import block

__all__ = ["keep"]

# Rows and columns of an end state that one program works out, and its warps.
_HEIGHT, _WIDTH, _WARPS = 64, 64, 4
# Rows of log bounds, and numbers of a tail, that it takes at once.
_ROWS, _NUMBERS = 64, 1024


@triton.jit
def _at(addresses, place, like, ALIGNED: tl.constexpr):
    """A pointer to numbers of the dtype of others, whose address stands in a place; ALIGNED: to 16 bytes, for wide loads."""
    pointer = tl.load(addresses + place).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _copy(source, target, first, end, BN: tl.constexpr):
    for i_n in range(first, end, BN):
        o_n = i_n + tl.arange(0, BN)
        tl.store(target + o_n, tl.load(source + o_n, mask=o_n < end, other=0.0), mask=o_n < end)


@triton.jit
def _keep_kernel(
    addresses, tokens, like_state, like_tail, tail_size,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, DENSE: tl.constexpr,
    BK: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One head of one body: a tile of its end state, and rows of the transition; beside the first tile the rest.

    A transition is `[K, K]` where DENSE, else `[ROWS, 1]`. addresses `[R, 9]`: those of `PassedBody`, then of `BodyPlanes`.
    """
    i_c, i_h, i_r = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(1), tl.program_id(2)
    i_k = tl.program_id(0) // tl.cdiv(V, BV)
    addresses += i_r * 9
    o_k, o_r, o_c = tl.arange(0, BK), i_k * BR + tl.arange(0, BR), i_c * BV + tl.arange(0, BV)
    m_k, m_r, m_c, is_first = o_k < K, o_r < K, (o_c < V)[None, :], tl.program_id(0) == 0
    p_h, m_h = i_h * K * V + o_r[:, None] * V + o_c[None, :], m_r[:, None] & m_c
    b_e = tl.load(_at(addresses, 2, like_state, ALIGNED) + p_h, mask=m_h, other=0.0)
    seam = _at(addresses, 1, like_state, ALIGNED)
    source, target = _at(addresses, 0, like_state, ALIGNED), _at(addresses, 5, like_state, ALIGNED)
    if DENSE:
        p_t, m_t = i_h * K * K + o_r[:, None] * K + o_k[None, :], m_r[:, None] & m_k[None, :]
        b_t = tl.load(source + p_t, mask=m_t, other=0.0)
        tl.store(target + p_t, b_t, mask=m_t & (i_c == 0))
        p_s = i_h * K * V + o_k[:, None] * V + o_c[None, :]
        b_e -= tl.dot(b_t, tl.load(seam + p_s, mask=m_k[:, None] & m_c, other=0.0), input_precision="tf32x3")
    else:
        b_t = tl.load(source + i_h * ROWS + (o_r if ROWS > 1 else 0 * o_r), mask=m_r, other=0.0)
        tl.store(target + i_h * ROWS + o_r, b_t, mask=(o_r < ROWS) & (i_c == 0))
        b_e -= b_t[:, None] * tl.load(seam + p_h, mask=m_h, other=0.0)
    tl.store(_at(addresses, 6, like_state, ALIGNED) + p_h, b_e, mask=m_h)
    if is_first:
        share = tl.cdiv(tail_size, H * BN) * BN
        _copy(
            _at(addresses, 3, like_tail, ALIGNED), _at(addresses, 7, like_tail, ALIGNED),
            i_h * share, tl.minimum((i_h + 1) * share, tail_size), BN,
        )  # fmt: skip
        bounds, count = _at(addresses, 4, like_state, ALIGNED), tl.load(tokens + i_r)
        b_d = tl.zeros([BT], dtype=tl.float32)
        for i_t in range(0, count, BT):
            o_t = i_t + tl.arange(0, BT)
            b_d += tl.load(bounds + o_t * H + i_h, mask=o_t < count, other=0.0)
        tl.store(_at(addresses, 8, like_state, ALIGNED) + i_h, tl.exp(tl.sum(b_d, axis=0)))


def _given(body: PassedBody) -> list[torch.Tensor]:
    every = (body.transition, body.seam_state, body.state, body.tail, body.log_bounds)
    return [tensor.contiguous() for tensor in every]


def keep(bodies: Sequence[PassedBody]) -> list[BodyPlanes]:
    """As `naive.keep`, on a GPU."""
    given = [_given(body) for body in bodies]
    kept = [
        [torch.empty_like(own[0]), torch.empty_like(own[2]), torch.empty_like(own[3]), own[2].new_empty(len(own[2]))]
        for own in given
    ]
    if bodies:
        _launch(given, kept)
    return [BodyPlanes(*own) for own in kept]


def _launch(given: Sequence[Sequence[torch.Tensor]], kept: Sequence[Sequence[torch.Tensor]]) -> None:
    addresses = [[tensor.data_ptr() for tensor in (*own, *planes)] for own, planes in zip(given, kept, strict=True)]
    tokens = [len(own[4]) for own in given]
    transition, state, tail = given[0][0], given[0][2], given[0][3]
    sent = torch.empty(10 * len(given), dtype=torch.int64, device=state.device)
    send_into(sent, torch.tensor([place for own in addresses for place in own] + tokens))
    (heads, rows, columns), (_, key_dim, value_dim) = transition.shape, state.shape
    height, width = min(_HEIGHT, block(key_dim)), min(_WIDTH, block(value_dim))
    _keep_kernel[(triton.cdiv(key_dim, height) * triton.cdiv(value_dim, width), heads, len(given))](
        sent, sent[9 * len(given) :], state, tail, tail.numel(),
        H=heads, K=key_dim, V=value_dim, ROWS=rows, DENSE=columns > 1, BK=block(key_dim), BR=height, BV=width,
        BN=_NUMBERS, BT=_ROWS,
        ALIGNED=all(place % BODY_ALIGNMENT == 0 for own in addresses for place in own), num_warps=_WARPS,
    )  # fmt: skip
