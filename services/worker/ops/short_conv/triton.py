"""The short convolution on a GPU: one launch for all runs, one for a step.

Before the launch a table says which row each of a token's `K − 1` predecessors is: a live row, or behind those a row of a
request's tail or of a stored one. The rows of the end tails are found in the same way and copied by the last programs.
The table depends on the walk alone and serves all layers of a pass.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from services.worker.ops.columns import FixedColumns, send_columns, send_into
from services.worker.ops.layout import BodyAddresses, PartWalk, WalkRoom
from services.worker.ops.short_conv.types import ConvResult

__all__ = ["FixedRows", "step", "walk"]

_TOKENS, _CHANNELS = 16, 256
_STEP_CHANNELS = 512


@triton.jit
def _load_rows(inputs, tails, stored, row, m_r, o_c, N, T, C, stride, HISTORY: tl.constexpr):
    """Rows `[BT, BC]`: live ones below N, the T of the requests' tails behind them, then those of stored tails."""
    m_c = (o_c < C)[None, :]
    is_live, is_stored = row < N, row >= N + T
    p_x = row.to(tl.int64)[:, None] * stride + o_c[None, :]
    b_x = tl.load(inputs + p_x, mask=(m_r & is_live)[:, None] & m_c, other=0.0)
    p_h = (row - N).to(tl.int64)[:, None] * C + o_c[None, :]
    b_h = tl.load(tails + p_h, mask=(m_r & (row >= N) & (row < N + T))[:, None] & m_c, other=0.0)
    place = tl.maximum(row - N - T, 0)
    address = tl.load(stored + place // HISTORY, mask=m_r & is_stored, other=0).to(
        tl.pointer_type(tails.dtype.element_ty)
    )
    p_s = address[:, None] + ((place % HISTORY) * C)[:, None] + o_c[None, :]
    b_s = tl.load(p_s, mask=(m_r & is_stored)[:, None] & m_c, other=0.0)
    return tl.where(is_live[:, None], b_x, tl.where(is_stored[:, None], b_s, b_h))


@triton.jit
def _walk_kernel(
    inputs, weight, tails, stored, predecessors, ends, outputs, end_tails, N, T, R, C, stride,
    TAPS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A block of tokens and channels; behind the last token a block of the R rows of end tails."""
    i_t, i_c = tl.program_id(0), tl.program_id(1)
    num_blocks = (N + BT - 1) // BT
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = (o_c < C)[None, :]
    HISTORY: tl.constexpr = TAPS - 1
    if i_t < num_blocks:
        o_t = i_t * BT + tl.arange(0, BT)
        m_t = o_t < N
        num_odd = 0
        for i_k in tl.static_range(HISTORY):
            row = tl.load(predecessors + o_t * HISTORY + i_k, mask=m_t, other=0)
            num_odd += tl.sum((m_t & (row != o_t + i_k - HISTORY)).to(tl.int32), axis=0)
        b_y = tl.zeros([BT, BC], dtype=tl.float32)
        if num_odd == 0:
            # Most blocks lie inside a run, where a token's predecessors are the rows ahead of it.
            for i_k in tl.static_range(TAPS):
                p_x = (o_t + i_k - HISTORY).to(tl.int64)[:, None] * stride + o_c[None, :]
                b_x = tl.load(inputs + p_x, mask=m_t[:, None] & m_c, other=0.0).to(tl.float32)
                b_y += b_x * tl.load(weight + o_c * TAPS + i_k, mask=o_c < C, other=0.0).to(tl.float32)[None, :]
        else:
            for i_k in tl.static_range(TAPS):
                row = tl.load(predecessors + o_t * HISTORY + i_k, mask=m_t, other=0) if i_k < HISTORY else o_t
                b_x = _load_rows(inputs, tails, stored, row, m_t, o_c, N, T, C, stride, HISTORY).to(tl.float32)
                b_y += b_x * tl.load(weight + o_c * TAPS + i_k, mask=o_c < C, other=0.0).to(tl.float32)[None, :]
        p_y = o_t.to(tl.int64)[:, None] * C + o_c[None, :]
        tl.store(outputs + p_y, b_y.to(outputs.dtype.element_ty), mask=m_t[:, None] & m_c)
    else:
        o_r = (i_t - num_blocks) * BT + tl.arange(0, BT)
        source = tl.load(ends + o_r, mask=o_r < R, other=0)
        b_e = _load_rows(inputs, tails, stored, source, o_r < R, o_c, N, T, C, stride, HISTORY)
        p_e = o_r.to(tl.int64)[:, None] * C + o_c[None, :]
        tl.store(end_tails + p_e, b_e.to(end_tails.dtype.element_ty), mask=(o_r < R)[:, None] & m_c)


@triton.jit
def _step_kernel(
    inputs, weight, tails, slots, outputs, C, stride,
    TAPS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One token of one request and block of channels; its tail moves up by a row."""
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < C
    home = tails + tl.load(slots + i_b).to(tl.int64) * (TAPS - 1) * C + o_c
    b_y = tl.zeros([BC], dtype=tl.float32)
    for i_k in tl.static_range(TAPS):
        if i_k < TAPS - 1:
            b_x = tl.load(home + i_k * C, mask=m_c, other=0.0)
        else:
            b_x = tl.load(inputs + i_b * stride + o_c, mask=m_c, other=0.0).to(tails.dtype.element_ty)
        b_y += b_x.to(tl.float32) * tl.load(weight + o_c * TAPS + i_k, mask=m_c, other=0.0).to(tl.float32)
        if i_k > 0:
            tl.store(home + (i_k - 1) * C, b_x, mask=m_c)
    tl.store(outputs + i_b * C + o_c, b_y.to(outputs.dtype.element_ty), mask=m_c)


@dataclass(frozen=True, slots=True)
class _Rows:
    """predecessors `[N (K − 1)]`; ends `[(B + kept) (K − 1)]`: rows of the tails behind every request and kept part. int32."""

    predecessors: torch.Tensor
    ends: torch.Tensor


def _columns(
    parts: PartWalk, history: int, stored: Sequence[bool], kept: Sequence[int], tokens: int
) -> tuple[NDArray[np.int32], list[int]]:
    """Columns of `_Rows` where `tokens` rows are live: those of the requests' tails stand behind them, then stored ones."""
    heads: list[int] = []
    before_heads: list[list[int]] = []
    ends: list[list[int]] = []
    kept_ends: dict[int, list[int]] = {}
    next_body = tokens + parts.num_requests * history
    for request in range(parts.num_requests):
        tail = list(range(tokens + request * history, tokens + (request + 1) * history))
        for part in parts.parts_of(request):
            run = parts.run(part)
            head = range(run.start, min(run.stop, run.start + history))
            known = [*tail, *head]
            heads += head
            before_heads += [known[place : place + history] for place in range(len(head))]
            tail = [*tail, *range(max(run.start, run.stop - history), run.stop)][-history:]
            if stored[part]:
                tail = list(range(next_body, next_body + history))
                next_body += history
            if part in kept:
                kept_ends[part] = tail
        ends.append(tail)
    ends += [kept_ends[part] for part in kept]
    before = np.arange(-history, 0)
    predecessors: NDArray[np.int32] = (np.arange(parts.num_tokens)[:, None] + before).astype(np.int32)
    if heads:
        predecessors[heads] = before_heads
    return predecessors.ravel(), [row for tail in ends for row in tail]


def _key(history: int, stored: Sequence[bool], kept: Sequence[int]) -> str:
    return f"short_conv {history} {list(stored)} {list(kept)}"


class FixedRows:
    """The walks of convolutions with one history in passes that are recorded once and replayed; see `FixedWalk`."""

    def __init__(self, history: int, room: WalkRoom, device: torch.device) -> None:
        self._history = history
        self._room = room
        sizes = (room.tokens * history, (room.requests + room.kept) * history)
        self._fixed = FixedColumns(sizes, (0, 0), device)

    def prepare(self, recorded: PartWalk) -> None:
        """See `FixedWalk`."""
        recorded.prepared[_key(self._history, [], range(self._room.kept))] = _Rows(*self._fixed.tensors)

    def refill(self, parts: PartWalk, stored: Sequence[bool], kept: Sequence[int]) -> None:
        """See `FixedWalk`."""
        self._fixed.refill(_columns(parts, self._history, stored, kept, self._room.tokens))


def walk(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    parts: PartWalk,
    tails: torch.Tensor,
    body_tails: Sequence[torch.Tensor | None],
    keep_after: Collection[int] = (),
    addresses: BodyAddresses | None = None,
) -> ConvResult:
    """As `naive.walk`, on a GPU, products and sums in fp32; channels of a row must be contiguous.

    addresses: where the stored tails lie, if it has been worked out.
    """
    (tokens, channels), (requests, history, _) = inputs.shape, tails.shape
    kept, stored = sorted(keep_after), [tail is not None for tail in body_tails]
    key = _key(history, stored, kept)
    if key not in parts.prepared:
        if addresses is not None and not body_tails:
            raise ValueError(f"nothing is prepared for this recorded walk: {key}")
        parts.prepared[key] = _Rows(*send_columns(_columns(parts, history, stored, kept, tokens), inputs.device))
    rows: _Rows = parts.prepared[key]
    places = _locate(body_tails, inputs.device) if addresses is None else addresses.table[2]
    outputs = inputs.new_empty(tokens, channels)
    end_tails = tails.new_empty(requests + len(kept), history, channels)
    num_ends = rows.ends.numel()
    blocks = triton.cdiv(tokens, _TOKENS) + triton.cdiv(num_ends, _TOKENS)
    _walk_kernel[(blocks, triton.cdiv(channels, _CHANNELS))](
        inputs, weight.contiguous(), tails.contiguous(), places, rows.predecessors, rows.ends, outputs, end_tails,
        tokens, requests * history, num_ends, channels, inputs.stride(0),
        TAPS=history + 1, BT=_TOKENS, BC=_CHANNELS, num_warps=4,
    )  # fmt: skip
    return ConvResult(outputs, end_tails[:requests], dict(zip(kept, end_tails[requests:], strict=True)))


def _locate(tails: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    places = [tail.data_ptr() for tail in tails if tail is not None]
    # A transfer would wait for the device in every layer of a pass without stored bodies.
    sent = torch.empty(max(1, len(places)), dtype=torch.int64, device=device)
    if places:
        send_into(sent, torch.tensor(places))
    return sent


def step(inputs: torch.Tensor, weight: torch.Tensor, tails: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """As `naive.step`, on a GPU; channels of a row must be contiguous."""
    requests, channels = inputs.shape
    outputs = inputs.new_empty(requests, channels)
    _step_kernel[(requests, triton.cdiv(channels, _STEP_CHANNELS))](
        inputs, weight.contiguous(), tails, slots, outputs, channels, inputs.stride(0),
        TAPS=weight.shape[1], BC=_STEP_CHANNELS, num_warps=4,
    )  # fmt: skip
    return outputs
