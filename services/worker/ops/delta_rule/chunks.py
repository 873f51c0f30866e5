"""The algebra inside chunks of the gated delta rule, shared by the forms that walk the chunks in different orders.

Inside a chunk with inclusive decay sums `G`, the writes `u` of all tokens solve a unit lower triangular system
`(I + A) u = β (v − e^G k·state)`, `A_ij = β_i e^(G_i − G_j) k_i·k_j` for `j < i` (the WY form of arXiv 2412.06464, §3.3).
Everything that does not need the state is computed for all chunks at once; chunks are anchored at each run's first
token, so a run's numbers do not depend on its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from services.worker.ops.delta_rule.types import DeltaInputs

__all__ = ["CHUNK_TOKENS", "Chunks", "Tiling", "prepare", "tile"]

CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Chunks:
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

    def select(self, chunks: torch.Tensor) -> "Chunks":
        """Several chunks `[n]` as one batch whose heads are stacked `[1, n · H, …]`, to advance n states together."""

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[chunks].flatten(0, 1)[None]

        return Chunks(
            pick(self.values),
            pick(self.readers),
            pick(self.queries),
            pick(self.scores),
            pick(self.writers),
            pick(self.decay),
        )


@dataclass(frozen=True, slots=True)
class Tiling:
    """Which packed tokens stand in which chunk.

    rows: `[M * L]` token of every chunk slot, N for padding; chunks_of: chunk indices of every run;
    slots: `[N]` chunk slot of every token.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    chunks_of: tuple[range, ...]
    length: int

    def unpack(self, tiles: torch.Tensor) -> torch.Tensor:
        """Outputs `[M, H, L, V]` of all chunks as packed tokens `[N, H, V]`."""
        return tiles.transpose(1, 2).flatten(0, 1)[self.slots]


def tile(cu_runs: Sequence[int], device: torch.device) -> Tiling:
    """Cut every run into chunks from its first token on; no chunk is longer than the longest run."""
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
    grid = torch.tensor(starts, dtype=torch.int64).view(-1, 1) + torch.arange(length)
    inside = grid < torch.tensor(ends, dtype=torch.int64).view(-1, 1)
    rows = torch.where(inside, grid, num_tokens).flatten().to(device)
    return Tiling(rows, inside.flatten().nonzero().flatten().to(device), tuple(chunks_of), length)


def prepare(inputs: DeltaInputs, tiling: Tiling) -> Chunks:
    """Everything about the chunks that does not need a state."""

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
    return Chunks(
        values=values.contiguous(),
        readers=readers.contiguous(),
        queries=sums.exp() * q,
        scores=q @ keys_t * decays,
        writers=((last - sums).exp() * k).transpose(-1, -2).contiguous(),
        decay=last.exp(),
    )
