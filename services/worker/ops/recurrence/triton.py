"""The recurrence on a GPU: one launch prepares all chunks, one launch carries every sequence over chunks and bodies.

`_prepare_kernel` runs a program a chunk and head and leaves what does not need a state (`chunks.py` has the algebra).
`_carry_kernel` runs a program a sequence, head and block of columns. The columns are `[state | transition]` of a scan
(design §5: the same recurrence with nothing written and nothing read out), or the state of a walk, which takes whole bodies
as one product between its chunks. Dots are fp32 in three tf32 passes: plain tf32 is off by 3e-4 in a transition.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl

from services.worker.ops.layout import Body, PartWalk
from services.worker.ops.recurrence.types import CaptureResult, RecurrenceInputs, ScanResult, WalkResult

__all__ = ["capture", "scan", "step", "walk"]

CHUNK_TOKENS = 64
CHANNEL_CHUNK_TOKENS = 16
NONE = -1


@triton.jit
def _prepare_kernel(
    q, k, v, log_decay, beta, starts, ends,
    queries, writers, readers, values, scores, decays,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ERASES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One chunk of one head; chunk rows behind the run's end count as tokens that do nothing.

    Log decays between two tokens are summed, not subtracted: the difference of two long sums loses a slow gate beside one
    that forgets at once.
    """
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, end = tl.load(starts + i_m).to(tl.int64), tl.load(ends + i_m)
    o_l, o_k, o_v = tl.arange(0, L), tl.arange(0, BK), tl.arange(0, BV)
    row = start * H + i_h
    m_t = start + o_l < end
    last = tl.minimum(end - start, L) - 1
    m_k = m_t[:, None] & (o_k < K)[None, :]
    p_k = row * K + o_l[:, None] * (H * K) + o_k[None, :]
    p_t = row + o_l * H
    b_q = tl.load(q + p_k, mask=m_k, other=0.0)
    b_k = tl.load(k + p_k, mask=m_k, other=0.0)
    if CHANNELS:
        b_x = tl.load(log_decay + p_k, mask=m_k, other=0.0)
        b_g = tl.cumsum(b_x, axis=0)
        b_s = tl.zeros([L, L], dtype=tl.float32)
        b_a = tl.zeros([L, L], dtype=tl.float32)
        b_r = tl.zeros([L, BK], dtype=tl.float32)
        for j in range(L):
            b_p = tl.cumsum(tl.where((o_l > j)[:, None], b_x, 0.0), axis=0)
            b_kj = tl.sum(tl.where((o_l == j)[:, None], b_k, 0.0), axis=0)
            reach = tl.where((o_l >= j)[:, None], tl.exp(b_p) * b_kj[None, :], 0.0)
            column = (o_l == j)[None, :]
            b_s = tl.where(column, tl.sum(b_q * reach, axis=1)[:, None], b_s)
            b_a = tl.where(column, tl.sum(b_k * reach, axis=1)[:, None], b_a)
            rest = tl.sum(tl.where((o_l == last)[:, None], b_p, 0.0), axis=0)
            b_r = tl.where((o_l == j)[:, None], rest[None, :], b_r)
        whole = tl.sum(tl.where((o_l == last)[:, None], b_g, 0.0), axis=0)
        tl.store(decays + (i_m * H + i_h) * K + o_k, tl.exp(whole), mask=o_k < K)
        b_e = tl.exp(b_g)
        b_r = tl.exp(b_r)
    else:
        b_x = tl.load(log_decay + p_t, mask=m_t, other=0.0)
        b_g = tl.cumsum(b_x, axis=0)
        b_p = tl.cumsum(tl.where(o_l[:, None] > o_l[None, :], b_x[:, None], 0.0), axis=0)
        near = tl.where(o_l[:, None] >= o_l[None, :], tl.exp(b_p), 0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="tf32x3") * near
        b_a = tl.dot(b_k, tl.trans(b_k), input_precision="tf32x3") * near
        tl.store(decays + i_m * H + i_h, tl.exp(tl.sum(tl.where(o_l == last, b_g, 0.0), axis=0)))
        b_e = tl.exp(b_g)[:, None]
        b_r = tl.exp(tl.sum(tl.where((o_l == last)[:, None], b_p, 0.0), axis=0))[:, None]
    tl.store(queries + p_k, b_q * b_e, mask=m_k)
    tl.store(writers + p_k, b_k * b_r, mask=m_k)
    tl.store(scores + row * L + o_l[:, None] * (H * L) + o_l[None, :], b_s, mask=m_t[:, None])
    if ERASES:
        b_b = tl.load(beta + p_t, mask=m_t, other=0.0)[:, None]
        b_i = _unit_lower_inverse(tl.where(o_l[:, None] > o_l[None, :], b_a * b_b, 0.0), L)
        tl.store(readers + p_k, tl.dot(b_i, b_k * b_e * b_b, input_precision="tf32x3"), mask=m_k)
        m_v = m_t[:, None] & (o_v < V)[None, :]
        p_v = row * V + o_l[:, None] * (H * V) + o_v[None, :]
        b_v = tl.load(v + p_v, mask=m_v, other=0.0)
        tl.store(values + p_v, tl.dot(b_i, b_v * b_b, input_precision="tf32x3"), mask=m_v)


@triton.jit
def _unit_lower_inverse(b_a, L: tl.constexpr):
    """`(I + A)⁻¹` of a strictly lower triangular `A` `[L, L]`, row by row."""
    o_l = tl.arange(0, L)
    b_i = -b_a
    for i in range(1, L):
        row = (o_l == i)[:, None]
        b_r = tl.sum(tl.where(row, b_i, 0.0), axis=0)
        b_r += tl.sum(b_r[:, None] * b_i, axis=0)
        b_i = tl.where(row & (o_l < i)[None, :], b_r[None, :], b_i)
    return b_i + (o_l[:, None] == o_l[None, :]).to(tl.float32)


@triton.jit
def _fp32(addresses, index):
    """The pointer whose address stands at an index."""
    return tl.load(addresses + index).to(tl.pointer_type(tl.float32))


@triton.jit
def _apply(transitions, body, b_h, i_h, K: tl.constexpr, BK: tl.constexpr, BODY: tl.constexpr):
    """`T · state`; an address of 0 is a body that forgets what came before."""
    o_k = tl.arange(0, BK)
    m_k = (o_k < K) & (tl.load(transitions + body) != 0)
    stored = _fp32(transitions, body)
    if BODY == 2:
        p_x = i_h * K * K + o_k[:, None] * K + o_k[None, :]
        b_x = tl.load(stored + p_x, mask=m_k[:, None] & (o_k < K)[None, :], other=0.0)
        b_h = tl.dot(b_x, b_h, input_precision="tf32x3")
    elif BODY == 1:
        b_h *= tl.load(stored + i_h * K + o_k, mask=m_k, other=0.0)[:, None]
    else:
        b_h *= tl.load(stored + i_h + 0 * o_k, mask=m_k, other=0.0)[:, None]
    return b_h


@triton.jit
def _carry_kernel(
    queries, writers, readers, values, scores, decays, starts, ends,
    cu_steps, steps, transitions, end_states,
    states, columns, outputs, kept, num_state_blocks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ERASES: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, BODY: tl.constexpr,
):  # fmt: skip
    """One sequence, one head, one block of columns `[K, BV]` of its state, or of its transition.

    steps rows: first chunk, last chunk, body, where to keep the state behind it, whether the transition takes part. A delta
    rule's transition blocks are behind the state's; they write into `columns` and read nothing out. BODY: the form of
    stored transitions, below 0 where no sequence has a body.
    """
    i_r, i_h, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    o_l, o_k = tl.arange(0, L), tl.arange(0, BK)
    of_state = True
    width, home = V, states
    if COLUMNS:
        of_state = i_c < num_state_blocks
        width = tl.where(of_state, V, K)
        i_c = tl.where(of_state, i_c, i_c - num_state_blocks)
        if not of_state:
            home = columns
    o_c = i_c * BV + tl.arange(0, BV)
    m_c = (o_c < width)[None, :]
    m_h = (o_k < K)[:, None] & m_c
    p_h = (i_r * H + i_h) * K * width + o_k[:, None] * width + o_c[None, :]
    b_h = tl.load(home + p_h, mask=m_h, other=0.0)
    for i_s in range(tl.load(cu_steps + i_r), tl.load(cu_steps + i_r + 1)):
        first_chunk, last_chunk = tl.load(steps + 5 * i_s), tl.load(steps + 5 * i_s + 1)
        if COLUMNS:
            takes_part = of_state | (tl.load(steps + 5 * i_s + 4) != 0)
            last_chunk = tl.where(takes_part, last_chunk, first_chunk)
        for i_m in range(first_chunk, last_chunk):
            start = tl.load(starts + i_m).to(tl.int64)
            m_t = (start + o_l < tl.load(ends + i_m))[:, None]
            m_k = m_t & (o_k < K)[None, :]
            row = start * H + i_h
            p_k = row * K + o_l[:, None] * (H * K) + o_k[None, :]
            p_v = row * V + o_l[:, None] * (H * V) + o_c[None, :]
            b_u = tl.load(values + p_v, mask=m_t & m_c & of_state, other=0.0)
            if ERASES:
                b_w = tl.load(readers + p_k, mask=m_k, other=0.0)
                b_u -= tl.dot(b_w, b_h, input_precision="tf32x3")
            if of_state:
                b_q = tl.load(queries + p_k, mask=m_k, other=0.0)
                b_s = tl.load(scores + row * L + o_l[:, None] * (H * L) + o_l[None, :], mask=m_t, other=0.0)
                b_o = tl.dot(b_q, b_h, input_precision="tf32x3") + tl.dot(b_s, b_u, input_precision="tf32x3")
                tl.store(outputs + p_v, b_o, mask=m_t & m_c)
            if CHANNELS:
                b_h *= tl.load(decays + (i_m * H + i_h) * K + o_k, mask=o_k < K, other=0.0)[:, None]
            else:
                b_h *= tl.load(decays + i_m * H + i_h)
            b_k = tl.load(writers + p_k, mask=m_k, other=0.0)
            b_h += tl.dot(tl.trans(b_k), b_u, input_precision="tf32x3")
        if BODY >= 0:
            body = tl.load(steps + 5 * i_s + 2)
            if body >= 0:
                p_e = i_h * K * V + o_k[:, None] * V + o_c[None, :]
                b_e = tl.load(_fp32(end_states, body) + p_e, mask=m_h, other=0.0)
                b_h = b_e + _apply(transitions, body, b_h, i_h, K, BK, BODY)
        keep = tl.load(steps + 5 * i_s + 3).to(tl.int64)
        if (keep >= 0) & of_state:
            tl.store(kept + (keep * H + i_h) * K * V + o_k[:, None] * V + o_c[None, :], b_h, mask=m_h)
    tl.store(home + p_h, b_h, mask=m_h)


@triton.jit
def _step_kernel(
    q, k, v, log_decay, beta, states, slots, outputs,
    H, K, V,
    BK: tl.constexpr, BV: tl.constexpr, ERASES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One token of one request and head on a block of columns of the state in its slot, in place."""
    i_b, i_h, i_v = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    row = i_b * H + i_h
    b_k = tl.load(k + row * K + o_k, mask=m_k, other=0.0)
    if CHANNELS:
        b_d = tl.exp(tl.load(log_decay + row * K + o_k, mask=m_k, other=0.0))[:, None]
    else:
        b_d = tl.exp(tl.load(log_decay + row))
    m_h = m_k[:, None] & m_v[None, :]
    p_h = ((tl.load(slots + i_b) * H + i_h) * K + o_k[:, None]) * V + o_v[None, :]
    b_h = b_d * tl.load(states + p_h, mask=m_h, other=0.0)
    b_v = tl.load(v + row * V + o_v, mask=m_v, other=0.0)
    if ERASES:
        b_v = tl.load(beta + row) * (b_v - tl.sum(b_k[:, None] * b_h, axis=0))
    b_h += b_k[:, None] * b_v[None, :]
    tl.store(states + p_h, b_h, mask=m_h)
    b_q = tl.load(q + row * K + o_k, mask=m_k, other=0.0)
    tl.store(outputs + row * V + o_v, tl.sum(b_q[:, None] * b_h, axis=0), mask=m_v)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Tiled tokens and what `_prepare_kernel` left of them. first: index of every run's first chunk, `[R + 1]`."""

    starts: torch.Tensor
    ends: torch.Tensor
    first: tuple[int, ...]
    length: int
    queries: torch.Tensor
    writers: torch.Tensor
    readers: torch.Tensor
    values: torch.Tensor
    scores: torch.Tensor
    decays: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Stop:
    """One stop of a sequence: chunks, then a body where there is one, then a kept state where it is wanted.

    of_body: the sequence's transition takes part.
    """

    chunks: range
    body: int = NONE
    keep: int = NONE
    of_body: bool = True


def _block(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))


def _prepare(inputs: RecurrenceInputs, cu_runs: Sequence[int]) -> _Chunks:
    every_channel = inputs.log_decay.ndim == 3
    length = CHANNEL_CHUNK_TOKENS if every_channel else CHUNK_TOKENS
    device, (tokens, heads, key_dim) = inputs.q.device, inputs.q.shape
    starts = [start for begin, end in pairwise(cu_runs) for start in range(begin, end, length)]
    counts = [-(-(end - begin) // length) for begin, end in pairwise(cu_runs)]
    ends = [end for (_, end), count in zip(pairwise(cu_runs), counts, strict=True) for _ in range(count)]
    first = [0]
    for count in counts:
        first.append(first[-1] + count)
    erases = inputs.beta is not None
    chunks = _Chunks(
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        ends=torch.tensor(ends, dtype=torch.int32, device=device),
        first=tuple(first),
        length=length,
        queries=torch.empty_like(inputs.q),
        writers=torch.empty_like(inputs.k),
        readers=torch.empty_like(inputs.k) if erases else inputs.k,
        values=torch.empty_like(inputs.v) if erases else inputs.v,
        scores=inputs.q.new_empty(tokens, heads, length),
        decays=inputs.q.new_empty(len(starts), *inputs.log_decay.shape[1:]),
    )
    if starts:
        _prepare_kernel[(len(starts), heads)](
            inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta if erases else inputs.q,
            chunks.starts, chunks.ends,
            chunks.queries, chunks.writers, chunks.readers, chunks.values, chunks.scores, chunks.decays,
            H=heads, K=key_dim, V=inputs.v.shape[-1], L=length, BK=_block(key_dim), BV=_block(inputs.v.shape[-1]),
            ERASES=erases, CHANNELS=every_channel, num_warps=8, num_stages=1,
        )  # fmt: skip
    return chunks


def _carry(
    inputs: RecurrenceInputs,
    chunks: _Chunks,
    stops: Sequence[Sequence[_Stop]],
    states: torch.Tensor,
    columns: torch.Tensor | None,
    bodies: Sequence[Body],
    num_kept: int,
) -> WalkResult:
    """Carry states `[R, H, K, V]`, and transition columns `[R, H, K, K]` where given, both in place."""
    device, (heads, key_dim, value_dim) = inputs.q.device, states.shape[1:]
    block = min(32, _block(value_dim))
    state_blocks = triton.cdiv(value_dim, block)
    column_blocks = 0 if columns is None else triton.cdiv(key_dim, block)
    rows = [
        (own.chunks.start, own.chunks.stop, own.body, own.keep, int(own.of_body))
        for sequence in stops
        for own in sequence
    ]
    cu_steps = [0]
    for sequence in stops:
        cu_steps.append(cu_steps[-1] + len(sequence))
    addresses = [
        [0 if body.transition is None else body.transition.data_ptr() for body in bodies],
        [body.end_state.data_ptr() for body in bodies],
    ]
    table = torch.tensor(addresses if bodies else [[0], [0]], dtype=torch.int64, device=device)
    outputs = torch.empty_like(inputs.v)
    kept = states.new_empty(max(1, num_kept), heads, key_dim, value_dim)
    _carry_kernel[(len(stops), heads, state_blocks + column_blocks)](
        chunks.queries, chunks.writers, chunks.readers, chunks.values, chunks.scores, chunks.decays,
        chunks.starts, chunks.ends,
        torch.tensor(cu_steps, dtype=torch.int32, device=device),
        torch.tensor(rows, dtype=torch.int32, device=device),
        table[0], table[1], states, states if columns is None else columns, outputs, kept, state_blocks,
        H=heads, K=key_dim, V=value_dim, L=chunks.length, BK=_block(key_dim), BV=block,
        ERASES=inputs.beta is not None, CHANNELS=inputs.log_decay.ndim == 3, COLUMNS=columns is not None,
        BODY=_body_form(bodies), num_warps=4, num_stages=1,
    )  # fmt: skip
    return WalkResult(outputs, states, dict(enumerate(kept[:num_kept])))


def _body_form(bodies: Sequence[Body]) -> int:
    """2 dense, 1 diagonal, 0 one number a head, −1 no body."""
    if not bodies:
        return NONE
    shapes = [body.transition.shape[-2:] for body in bodies if body.transition is not None]
    if not shapes or shapes[0][1] > 1:
        return 2
    return 1 if shapes[0][0] > 1 else 0


def _contiguous(inputs: RecurrenceInputs) -> RecurrenceInputs:
    beta = None if inputs.beta is None else inputs.beta.contiguous()
    q, k, v, log_decay = (each.contiguous() for each in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
    return RecurrenceInputs(q, k, v, log_decay, beta)


def scan(
    inputs: RecurrenceInputs, cu_runs: Sequence[int], states: torch.Tensor, transitions: torch.Tensor | None
) -> ScanResult:
    """As `naive.scan`, fp32 on a GPU."""
    inputs = _contiguous(inputs)
    chunks = _prepare(inputs, cu_runs)
    stops = [[_Stop(range(*pair))] for pair in pairwise(chunks.first)]
    columns = None
    if transitions is not None and inputs.beta is not None:
        columns = transitions.clone(memory_format=torch.contiguous_format)
    result = _carry(inputs, chunks, stops, states.clone(), columns, (), 0)
    if transitions is not None and inputs.beta is None:
        columns = transitions * _decays(inputs, cu_runs, transitions.shape[-2])
    return ScanResult(result.outputs, result.states, columns)


def capture(
    inputs: RecurrenceInputs,
    cu_runs: Sequence[int],
    seam_tokens: Sequence[int],
    states: torch.Tensor,
    transitions: torch.Tensor,
) -> CaptureResult:
    """As `naive.capture`, fp32 on a GPU: seams, bodies and transitions in one launch."""
    inputs = _contiguous(inputs)
    edges = [edge for start, seam in zip(cu_runs[:-1], seam_tokens, strict=True) for edge in (start, start + seam)]
    cu_halves = [*edges, cu_runs[-1]]
    chunks = _prepare(inputs, cu_halves)
    pairs = [range(*pair) for pair in pairwise(chunks.first)]
    stops = [
        [_Stop(pairs[2 * run], keep=run, of_body=False), _Stop(pairs[2 * run + 1])] for run in range(len(seam_tokens))
    ]
    if inputs.beta is None:
        bodies = slice(1, None, 2)
        columns = transitions * _decays(inputs, cu_halves, transitions.shape[-2])[bodies]
        result = _carry(inputs, chunks, stops, states.clone(), None, (), len(stops))
    else:
        columns = transitions.clone(memory_format=torch.contiguous_format)
        result = _carry(inputs, chunks, stops, states.clone(), columns, (), len(stops))
    seam_states = torch.stack([result.kept[run] for run in range(len(stops))])
    return CaptureResult(result.outputs, result.states, seam_states, columns)


def _decays(inputs: RecurrenceInputs, cu_runs: Sequence[int], rows: int) -> torch.Tensor:
    """The product of each run's decays `[R, H, rows, 1]`: the transition where nothing is erased."""
    lengths = torch.tensor([end - begin for begin, end in pairwise(cu_runs)], device=inputs.q.device)
    runs = torch.repeat_interleave(torch.arange(len(lengths), device=inputs.q.device), lengths)
    log_decay = inputs.log_decay.reshape(inputs.log_decay.shape[0], inputs.log_decay.shape[1], rows, 1)
    sums = log_decay.new_zeros(len(lengths), *log_decay.shape[1:]).index_add_(0, runs, log_decay)
    return sums.exp()


def walk(
    inputs: RecurrenceInputs,
    parts: PartWalk,
    states: torch.Tensor,
    bodies: Sequence[Body | None],
    keep_after: Collection[int] = (),
) -> WalkResult:
    """As `naive.walk`, fp32 on a GPU."""
    inputs = _contiguous(inputs)
    chunks = _prepare(inputs, parts.cu_runs)
    kept_parts = sorted(keep_after)
    present = [body for body in bodies if body is not None]
    places = iter(range(len(present)))
    body_of = [NONE if body is None else next(places) for body in bodies]
    keep_of = {part: index for index, part in enumerate(kept_parts)}
    stops = [
        [
            _Stop(range(chunks.first[part], chunks.first[part + 1]), body_of[part], keep_of.get(part, NONE))
            for part in parts.parts_of(request)
        ]
        for request in range(states.shape[0])
    ]
    result = _carry(inputs, chunks, stops, states.clone(), None, present, len(kept_parts))
    return WalkResult(result.outputs, result.states, {part: result.kept[index] for part, index in keep_of.items()})


def step(inputs: RecurrenceInputs, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """As `naive.step`, fp32 on a GPU."""
    inputs, outputs = _contiguous(inputs), torch.empty_like(inputs.v)
    heads, key_dim, value_dim = states.shape[1:]
    block = min(32, _block(value_dim))
    _step_kernel[(len(slots), heads, triton.cdiv(value_dim, block))](
        inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.q if inputs.beta is None else inputs.beta,
        states, slots, outputs, heads, key_dim, value_dim,
        BK=_block(key_dim), BV=block, ERASES=inputs.beta is not None, CHANNELS=inputs.log_decay.ndim == 3,
        num_warps=4,
    )  # fmt: skip
    return outputs
