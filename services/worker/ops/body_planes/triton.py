"""The op on a GPU: one launch for all bodies of a layer, found and left by their addresses."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from services.worker.ops.body_planes.types import BodyPlanes, PackedBodies, PassedBody
from services.worker.ops.columns import send_into
from services.worker.ops.layout import BODY_ALIGNMENT
from services.worker.ops.tiles import block

__all__ = ["keep", "keep_packed"]

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
def _source(addresses, place, packed, size, i_r, PACKED: tl.constexpr, ALIGNED: tl.constexpr):
    """What a body leaves: one of several that are packed, or at an address of its own."""
    if PACKED:
        return packed + i_r.to(tl.int64) * size
    return _at(addresses, place, packed, ALIGNED)


@triton.jit
def _keep_kernel(
    addresses, firsts, counts, transitions, seam_states, states, tails, log_bounds, tail_size,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, DENSE: tl.constexpr,
    BK: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    PACKED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One head of one body: a tile of its end state, and rows of the transition; beside the first tile the rest.

    A transition is `[K, K]` where DENSE, else `[ROWS, 1]`. addresses `[R, 9]`: those of `PassedBody`, then of `BodyPlanes`;
    `[R, 4]` of the latter alone where bodies are PACKED.
    """
    i_c, i_h, i_r = tl.program_id(0) % tl.cdiv(V, BV), tl.program_id(1), tl.program_id(2)
    i_k = tl.program_id(0) // tl.cdiv(V, BV)
    TO: tl.constexpr = 0 if PACKED else 5
    SIZE: tl.constexpr = K * K if DENSE else ROWS
    addresses += i_r * (TO + 4)
    if tl.load(addresses + TO) == 0:
        return
    o_k, o_r, o_c = tl.arange(0, BK), i_k * BR + tl.arange(0, BR), i_c * BV + tl.arange(0, BV)
    m_k, m_r, m_c, is_first = o_k < K, o_r < K, (o_c < V)[None, :], tl.program_id(0) == 0
    p_h, m_h = i_h * K * V + o_r[:, None] * V + o_c[None, :], m_r[:, None] & m_c
    b_e = tl.load(_source(addresses, 2, states, H * K * V, i_r, PACKED, ALIGNED) + p_h, mask=m_h, other=0.0)
    seam = _source(addresses, 1, seam_states, H * K * V, i_r, PACKED, ALIGNED)
    source = _source(addresses, 0, transitions, H * SIZE, i_r, PACKED, ALIGNED)
    target = _at(addresses, TO, transitions, ALIGNED)
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
    tl.store(_at(addresses, TO + 1, states, ALIGNED) + p_h, b_e, mask=m_h)
    if is_first:
        share = tl.cdiv(tail_size, H * BN) * BN
        _copy(
            _source(addresses, 3, tails, tail_size, i_r, PACKED, ALIGNED), _at(addresses, TO + 2, tails, ALIGNED),
            i_h * share, tl.minimum((i_h + 1) * share, tail_size), BN,
        )  # fmt: skip
        count = tl.load(counts + i_r)
        bounds = log_bounds + tl.load(firsts + i_r) * H if PACKED else _at(addresses, 4, log_bounds, ALIGNED)
        b_d = tl.zeros([BT], dtype=tl.float32)
        for i_t in range(0, count, BT):
            o_t = i_t + tl.arange(0, BT)
            b_d += tl.load(bounds + o_t * H + i_h, mask=o_t < count, other=0.0)
        tl.store(_at(addresses, TO + 3, states, ALIGNED) + i_h, tl.exp(tl.sum(b_d, axis=0)))


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
    transition, seam_state, state, tail, log_bounds = given[0]
    sent = torch.empty(10 * len(given), dtype=torch.int64, device=state.device)
    send_into(sent, torch.tensor([place for own in addresses for place in own] + tokens))
    counts = sent[9 * len(given) :]
    sources = (counts, counts, transition, seam_state, state, tail, log_bounds)
    shape = _Shape(transition.shape, state.shape, tail.numel(), len(given))
    shape.launch(sent, sources, False, all(place % BODY_ALIGNMENT == 0 for own in addresses for place in own))


def keep_packed(bodies: PackedBodies, targets: torch.Tensor, is_aligned: bool) -> None:
    """See `body_planes.keep_packed`."""
    packed = (bodies.transitions, bodies.seam_states, bodies.states, bodies.tails, bodies.log_bounds)
    sources = (bodies.firsts, bodies.counts, *(tensor.contiguous() for tensor in packed))
    shape = _Shape(bodies.transitions.shape[1:], bodies.states.shape[1:], bodies.tails[0].numel(), len(targets))
    shape.launch(targets, sources, True, is_aligned)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of bodies' transitions `[H, rows, columns]`, states `[H, K, V]` and tails, and their number."""

    transition: Sequence[int]
    state: Sequence[int]
    tail_size: int
    count: int

    def launch(
        self, addresses: torch.Tensor, sources: Sequence[torch.Tensor], is_packed: bool, is_aligned: bool
    ) -> None:
        """One launch for all of them; sources: in the order of the kernel."""
        (heads, rows, columns), (_, key_dim, value_dim) = self.transition, self.state
        height, width = min(_HEIGHT, block(key_dim)), min(_WIDTH, block(value_dim))
        _keep_kernel[(triton.cdiv(key_dim, height) * triton.cdiv(value_dim, width), heads, self.count)](
            addresses, *sources, self.tail_size,
            H=heads, K=key_dim, V=value_dim, ROWS=rows, DENSE=columns > 1, BK=block(key_dim), BR=height, BV=width,
            BN=_NUMBERS, BT=_ROWS, PACKED=is_packed, ALIGNED=is_aligned, num_warps=_WARPS,
        )  # fmt: skip
