"""Full attention over pages, with query and key norms, partial rotary position and an output gate where the family has one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.worker.mixers.batch import CaptureBatch, CombineBatch, DecodeBatch
from services.worker.ops.norm import rms_norm
from services.worker.ops.paged_attention import AttentionShape
from services.worker.ops.paged_attention import chunked as paged_attention
from services.worker.ops.rotary import Rotary

__all__ = ["AttentionWeights", "FullAttention", "FullAttentionShape", "PagePool"]


@dataclass(frozen=True, slots=True)
class FullAttentionShape:
    """Heads and channels; rotary_dim leading channels of a head carry position; gated: `q_proj` is `[q | gate]` a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rotary_theta: float
    gated: bool
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """in_proj: rows of q (and gate), k, v fused; q_norm, k_norm `[D]`, None where the family has none."""

    in_proj: torch.Tensor
    out_proj: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PagePool:
    """One attention layer's pages: keys, values `[pages, page_size, Hkv, D]`. Slots are numbered over pages."""

    keys: torch.Tensor
    values: torch.Tensor

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store tokens `[N, Hkv, D]` at flat slots `[N]`."""
        self.keys.flatten(0, 1)[slots] = keys
        self.values.flatten(0, 1)[slots] = values


@dataclass(frozen=True, slots=True)
class _Heads:
    """q `[N, Hq, D]`, k and v `[N, Hkv, D]`, all unrotated; gate `[N, Hq · D]` or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class FullAttention:
    """One layer with its page pool."""

    shape: FullAttentionShape
    weights: AttentionWeights
    rotary: Rotary | None
    pool: PagePool

    def capture(self, hidden: torch.Tensor, batch: CaptureBatch) -> torch.Tensor:
        """See `Mixer`; keys are stored rotated by their place inside the segment."""
        heads = self._project(hidden)
        self._store(heads, batch.positions - batch.base, batch.write_slots)
        mixed = paged_attention.attend(
            heads.q, batch.positions, batch.cu_runs, batch.tables, (self.pool.keys, self.pool.values), self._geometry()
        )
        return self._finish(mixed, heads.gate)

    def combine(self, hidden: torch.Tensor, batch: CombineBatch) -> torch.Tensor:
        """See `Mixer`; live keys are stored rotated by their true position."""
        heads = self._project(hidden)
        self._store(heads, batch.positions, batch.write_slots)
        mixed = paged_attention.attend(
            heads.q,
            batch.positions,
            batch.cu_queries,
            batch.tables,
            (self.pool.keys, self.pool.values),
            self._geometry(),
        )
        return self._finish(mixed, heads.gate)

    def decode(self, hidden: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """See `Mixer`."""
        heads = self._project(hidden)
        self._store(heads, batch.positions, batch.write_slots)
        mixed = paged_attention.attend(
            heads.q,
            batch.positions,
            range(hidden.shape[0] + 1),
            batch.tables,
            (self.pool.keys, self.pool.values),
            self._geometry(),
        )
        return self._finish(mixed, heads.gate)

    def _geometry(self) -> AttentionShape:
        return AttentionShape(self.shape.head_dim**-0.5, self.rotary)

    def _project(self, hidden: torch.Tensor) -> _Heads:
        shape = self.shape
        query_width = shape.num_heads * shape.head_dim * (2 if shape.gated else 1)
        kv_width = shape.num_kv_heads * shape.head_dim
        q, k, v = F.linear(hidden, self.weights.in_proj).split([query_width, kv_width, kv_width], dim=-1)
        q = q.unflatten(-1, (shape.num_heads, -1))
        gate = None
        if shape.gated:
            q, gate = q.split(shape.head_dim, dim=-1)
            gate = gate.flatten(-2)
        k = k.unflatten(-1, (shape.num_kv_heads, -1))
        v = v.unflatten(-1, (shape.num_kv_heads, -1))
        return _Heads(self._norm(q, self.weights.q_norm), self._norm(k, self.weights.k_norm), v, gate)

    def _norm(self, heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return heads if weight is None else rms_norm(heads, weight, self.shape.eps)

    def _store(self, heads: _Heads, places: torch.Tensor, slots: torch.Tensor) -> None:
        keys = heads.k if self.rotary is None else self.rotary.rotate(heads.k, places)
        self.pool.write(slots, keys, heads.v)

    def _finish(self, mixed: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        flat = mixed.flatten(-2)
        return F.linear(flat if gate is None else flat * gate.sigmoid(), self.weights.out_proj)
