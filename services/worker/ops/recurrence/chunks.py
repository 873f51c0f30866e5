"""The algebra inside chunks of the recurrence, shared by the forms that walk the chunks in different orders.

Inside a chunk with inclusive decay sums `G` (one a head, or one a key channel), the writes `u` of all tokens of a delta
rule solve a unit lower triangular system `(I + A) u = β (v − (e^G k)ᵀ state)`, `A_ij = β_i k_i · e^(G_i − G_j) k_j` for
`j < i` (the WY form of arXiv 2412.06464, §3.3); without an erasure `u = v`. Everything that does not need the state is
computed for all chunks at once; chunks are anchored at each run's first token, so a run's numbers do not depend on its
neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from services.worker.ops.recurrence.types import RecurrenceInputs

__all__ = ["CHANNEL_CHUNK_TOKENS", "CHUNK_TOKENS", "Chunks", "Tiling", "prepare", "tile", "walk_chunk_tokens"]

CHUNK_TOKENS = 64
# Decays of every channel cost one exponential a pair of tokens and channel.
CHANNEL_CHUNK_TOKENS = 16
# Chunks of seam windows, most of which are shorter than a full chunk.
_SHORT_CHUNK_TOKENS = 16
# A chunk more is a step more in order: short chunks pay while they are no more than half as many again.
_MOST_SHORT_CHUNKS = 1.5


def walk_chunk_tokens(run_lengths: Sequence[int], of_channels: bool) -> int:
    """Tokens of a chunk in a walk over such live runs, on a device whose chunks cost what a full one does."""
    if of_channels:
        return CHANNEL_CHUNK_TOKENS
    short, full = (sum(-(-run // tokens) for run in run_lengths) for tokens in (_SHORT_CHUNK_TOKENS, CHUNK_TOKENS))
    return _SHORT_CHUNK_TOKENS if short <= _MOST_SHORT_CHUNKS * full else CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Chunks:
    """State-free quantities of all chunks M of length L (the last dimension but one).

    values `(I+A)⁻¹ βv` `[M, H, L, V]`; readers `(I+A)⁻¹ βe^G k` `[M, H, L, K]`, None where nothing is erased and values
    are `v`; queries `e^G q` `[M, H, L, K]`; scores `q_i · e^(G_i−G_j) k_j` `[M, H, L, L]`; writers `e^(G_L−G) k` transposed
    `[M, H, K, L]`; decay `e^(G_L)` `[M, H, 1, 1]`, or `[M, H, K, 1]` for decays of every channel.
    """

    values: torch.Tensor
    readers: torch.Tensor | None
    queries: torch.Tensor
    scores: torch.Tensor
    writers: torch.Tensor
    decay: torch.Tensor

    def advance(self, chunk: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs `[H, L, V]` of one chunk and the state `[H, K, V]` after it."""
        written = self.values[chunk]
        if self.readers is not None:
            written = torch.baddbmm(written, self.readers[chunk], state, alpha=-1)
        outputs = torch.bmm(self.queries[chunk], state).baddbmm_(self.scores[chunk], written)
        return outputs, torch.baddbmm(self.decay[chunk] * state, self.writers[chunk], written)

    def advance_transition(self, chunk: int, transition: torch.Tensor) -> torch.Tensor:
        """The transition after one chunk, in its form: the same recurrence with nothing written."""
        if self.readers is None:
            return self.decay[chunk] * transition
        written = torch.bmm(self.readers[chunk], transition)
        return torch.baddbmm(self.decay[chunk] * transition, self.writers[chunk], written, alpha=-1)

    def select(self, chunks: torch.Tensor) -> "Chunks":
        """Several chunks `[n]` as one batch whose heads are stacked `[1, n · H, …]`, to advance n states together."""

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[chunks].flatten(0, 1)[None]

        return Chunks(
            pick(self.values),
            None if self.readers is None else pick(self.readers),
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


def tile(cu_runs: Sequence[int], inputs: RecurrenceInputs) -> Tiling:
    """Cut every run into chunks from its first token on; no chunk is longer than the longest run."""
    num_tokens = cu_runs[-1]
    longest = max((end - start for start, end in pairwise(cu_runs)), default=0)
    length = max(1, min(CHUNK_TOKENS if inputs.log_decay.ndim == 2 else CHANNEL_CHUNK_TOKENS, longest))
    device = inputs.q.device
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


def prepare(inputs: RecurrenceInputs, tiling: Tiling) -> Chunks:
    """Everything about the chunks that does not need a state."""

    def chunks(packed: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([packed, packed.new_zeros(1, *packed.shape[1:])])
        tiles: torch.Tensor = padded[tiling.rows].unflatten(0, (-1, tiling.length))
        return tiles.transpose(1, 2).contiguous()

    q, k, v = chunks(inputs.q), chunks(inputs.k), chunks(inputs.v)
    steps = chunks(inputs.log_decay if inputs.log_decay.ndim == 3 else inputs.log_decay[..., None])
    sums = steps.cumsum(-2)
    values, readers = v, None
    if inputs.beta is None:
        (scores,) = _decayed_products([q], k, steps)
    else:
        beta = chunks(inputs.beta).unsqueeze(-1)
        scores, erasures = _decayed_products([q, k], k, steps)
        # solve_triangular takes the unit diagonal as given and reads only below it.
        rights = torch.cat([beta * v, beta * sums.exp() * k], dim=-1)
        solved = torch.linalg.solve_triangular(beta * erasures, rights, upper=False, unitriangular=True)
        solved_values, solved_readers = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        values, readers = solved_values.contiguous(), solved_readers.contiguous()
    return Chunks(
        values=values,
        readers=readers,
        queries=sums.exp() * q,
        scores=scores,
        writers=(_sums_behind(steps).exp() * k).transpose(-1, -2).contiguous(),
        decay=sums[:, :, -1:].exp().transpose(-1, -2),
    )


def _sums_behind(steps: torch.Tensor) -> torch.Tensor:
    """`G_L − G` of steps `[M, H, L, X]`, summed from the end: see `_decayed_products`."""
    later = torch.cat([steps[:, :, 1:], torch.zeros_like(steps[:, :, :1])], dim=2)
    return later.flip(2).cumsum(2).flip(2)


def _decayed_products(lefts: Sequence[torch.Tensor], right: torch.Tensor, steps: torch.Tensor) -> list[torch.Tensor]:
    """`left_i · e^(G_i − G_j) right_j` for `j ≤ i`, else 0, `[M, H, L, L]` of each left.

    `G_i − G_j` is summed over the steps between: as a difference of sums it would lose what decays slowly behind a token
    that forgets everything, and `e^(−G_j)` alone would overflow.
    """
    if steps.shape[-1] > 1:
        return _channel_products(lefts, right, steps)
    places = torch.arange(right.shape[-2], device=right.device)
    later = places[:, None] < places
    between = steps.masked_fill(places[:, None] <= places, 0.0).cumsum(-2)
    decays = between.masked_fill_(later, float("-inf")).exp_()
    return [left @ right.transpose(-1, -2) * decays for left in lefts]


def _channel_products(lefts: Sequence[torch.Tensor], right: torch.Tensor, steps: torch.Tensor) -> list[torch.Tensor]:
    """Column by column from the last one, so that the steps between grow by one at a time."""
    length = right.shape[-2]
    products = [left.new_zeros(*left.shape[:-1], length) for left in lefts]
    between = torch.zeros_like(steps)
    for place in reversed(range(length)):
        between[:, :, place + 1 :] += steps[:, :, place + 1 : place + 2]
        decayed = between[:, :, place:].exp() * right[:, :, place : place + 1]
        for left, product in zip(lefts, products, strict=True):
            product[:, :, place:, place] = (left[:, :, place:] * decayed).sum(-1)
    return products
