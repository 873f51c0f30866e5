"""The gated delta rule in chunks of tokens: matrix products inside a chunk, a short recurrence across chunks.

Inside a chunk with inclusive decay sums `G`, the writes `u` of all tokens solve a unit lower triangular system
`(I + A) u = β (v − e^G k·state)`, `A_ij = β_i e^(G_i − G_j) k_i·k_j` for `j < i` (the WY form of arXiv 2412.06464, §3.3).
Everything that does not need the state is computed for all chunks at once; chunks are anchored at each run's first
token, so a run's numbers do not depend on its neighbours.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from services.worker.ops.delta_rule.types import DeltaInputs, ScanResult, WalkResult
from services.worker.ops.layout import Body, PartWalk

__all__ = ["CHUNK_TOKENS", "scan", "step", "walk"]

CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Chunks:
    """State-free quantities of all chunks M of length L (the last dimension but one).

    values `(I+A)⁻¹ βv` `[M, H, L, V]`; readers `(I+A)⁻¹ βe^G k` `[M, H, L, K]`; queries `e^G q` `[M, H, L, K]`;
    scores `e^(G_i−G_j) q_i·k_j` `[M, H, L, L]`; writers `e^(G_L−G) k` transposed `[M, H, K, L]`; decay `e^(G_L)` `[M, H, 1, 1]`.
    """

    values: torch.Tensor
    readers: torch.Tensor
    queries: torch.Tensor
    scores: torch.Tensor
    writers: torch.Tensor
    decay: torch.Tensor

    def advance(self, chunk: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs `[H, L, V]` of one chunk and the state `[H, K, V]` after it."""
        written = torch.baddbmm(self.values[chunk], self.readers[chunk], state, alpha=-1)
        outputs = torch.bmm(self.queries[chunk], state).baddbmm_(self.scores[chunk], written)
        return outputs, torch.baddbmm(self.decay[chunk] * state, self.writers[chunk], written)

    def advance_transition(self, chunk: int, transition: torch.Tensor) -> torch.Tensor:
        """The transition `[H, K, K]` after one chunk: the same recurrence with nothing written."""
        written = torch.bmm(self.readers[chunk], transition)
        return torch.baddbmm(self.decay[chunk] * transition, self.writers[chunk], written, alpha=-1)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Which packed tokens stand in which chunk.

    rows: `[M * L]` token of every chunk slot, N for padding; chunks_of: chunk indices of every run;
    slots: `[N]` chunk slot of every token.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    chunks_of: tuple[range, ...]
    length: int


def _tile(cu_runs: Sequence[int], device: torch.device) -> _Tiling:
    num_tokens = cu_runs[-1]
    longest = max((end - start for start, end in pairwise(cu_runs)), default=0)
    length = max(1, min(CHUNK_TOKENS, longest))
    starts: list[int] = []
    chunks_of: list[range] = []
    ends: list[int] = []
    for start, end in pairwise(cu_runs):
        first = len(starts)
        starts.extend(range(start, end, length))
        ends.extend([end] * (len(starts) - first))
        chunks_of.append(range(first, len(starts)))
    grid = torch.tensor(starts).view(-1, 1) + torch.arange(length)
    inside = grid < torch.tensor(ends).view(-1, 1)
    rows = torch.where(inside, grid, num_tokens).flatten().to(device)
    return _Tiling(rows, inside.flatten().nonzero().flatten().to(device), tuple(chunks_of), length)


def _prepare(inputs: DeltaInputs, tiling: _Tiling) -> _Chunks:
    def chunks(packed: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([packed, packed.new_zeros(1, *packed.shape[1:])])
        tiles: torch.Tensor = padded[tiling.rows].unflatten(0, (-1, tiling.length))
        return tiles.transpose(1, 2).contiguous()

    q, k, v = chunks(inputs.q), chunks(inputs.k), chunks(inputs.v)
    beta = chunks(inputs.beta).unsqueeze(-1)
    sums = chunks(inputs.log_decay).cumsum(-1).unsqueeze(-1)
    lower = torch.ones(tiling.length, tiling.length, dtype=torch.bool, device=q.device).tril()
    # Above the diagonal the difference is positive and would overflow before it is masked.
    decays = (sums - sums.transpose(-1, -2)).masked_fill(~lower, float("-inf")).exp()
    keys_t = k.transpose(-1, -2)
    # solve_triangular takes the unit diagonal as given and reads only below it.
    system = (beta * k) @ keys_t * decays
    rights = torch.cat([beta * v, beta * sums.exp() * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, rights, upper=False, unitriangular=True)
    values, readers = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    last = sums[:, :, -1:, :]
    return _Chunks(
        values=values.contiguous(),
        readers=readers.contiguous(),
        queries=sums.exp() * q,
        scores=q @ keys_t * decays,
        writers=((last - sums).exp() * k).transpose(-1, -2).contiguous(),
        decay=last.exp(),
    )


def _unpack(tiles: list[torch.Tensor], tiling: _Tiling, like: torch.Tensor) -> torch.Tensor:
    if not tiles:
        return torch.empty_like(like)
    return torch.stack(tiles).transpose(1, 2).flatten(0, 1)[tiling.slots]


def scan(
    inputs: DeltaInputs, cu_runs: Sequence[int], states: torch.Tensor, transitions: torch.Tensor | None
) -> ScanResult:
    """As `naive.scan`."""
    tiling = _tile(cu_runs, inputs.q.device)
    prepared = _prepare(inputs, tiling)
    tiles: list[torch.Tensor] = []
    end_states, end_transitions = [], []
    for run, chunks in enumerate(tiling.chunks_of):
        state = states[run]
        transition = None if transitions is None else transitions[run]
        for chunk in chunks:
            outputs, state = prepared.advance(chunk, state)
            tiles.append(outputs)
            if transition is not None:
                transition = prepared.advance_transition(chunk, transition)
        end_states.append(state)
        if transition is not None:
            end_transitions.append(transition)
    return ScanResult(
        outputs=_unpack(tiles, tiling, inputs.v),
        states=torch.stack(end_states),
        transitions=None if transitions is None else torch.stack(end_transitions),
    )


def walk(
    inputs: DeltaInputs,
    parts: PartWalk,
    states: torch.Tensor,
    bodies: Sequence[Body | None],
    keep_after: Collection[int] = (),
) -> WalkResult:
    """As `naive.walk`."""
    tiling = _tile(parts.cu_runs, inputs.q.device)
    prepared = _prepare(inputs, tiling)
    tiles: list[torch.Tensor] = []
    end_states: list[torch.Tensor] = []
    kept: dict[int, torch.Tensor] = {}
    for request in range(len(parts.cu_parts) - 1):
        state = states[request]
        for part in parts.parts_of(request):
            for chunk in tiling.chunks_of[part]:
                outputs, state = prepared.advance(chunk, state)
                tiles.append(outputs)
            body = bodies[part]
            if body is not None:
                state = body.apply(state)
            if part in keep_after:
                kept[part] = state.clone()
        end_states.append(state)
    return WalkResult(_unpack(tiles, tiling, inputs.v), torch.stack(end_states), kept)


def step(inputs: DeltaInputs, states: torch.Tensor) -> WalkResult:
    """As `naive.step`, all requests at once."""
    decayed = inputs.log_decay.exp()[..., None, None] * states
    read = (inputs.k[..., None] * decayed).sum(-2)
    written = inputs.beta[..., None] * (inputs.v - read)
    updated = decayed + inputs.k[..., None] * written[..., None, :]
    return WalkResult((inputs.q[..., None] * updated).sum(-2), updated, {})
