"""Attention over pages: what every family of attention layers does between its projections."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.mixers.batch import CaptureBatch, CombineBatch, DecodeBatch
from services.worker.ops.latent_attention import Expansion
from services.worker.ops.latent_attention import dispatch as latent_attention
from services.worker.ops.page_store import FreshTokens, KeyForm, KeyNorm
from services.worker.ops.page_store import dispatch as page_store
from services.worker.ops.paged_attention import AttentionShape, PagedQueries
from services.worker.ops.paged_attention import dispatch as paged_attention
from services.worker.ops.rotary import Rotary

__all__ = ["AttentionProjection", "Heads", "PagePool", "PagedAttention"]


@dataclass(frozen=True, slots=True)
class PagePool:
    """One attention layer's pages: keys `[pages, page_size, Hkv, D]`, values `[pages, page_size, Hkv, Dv]`.

    Slots are numbered over pages. latent: values are a view of the last channels of the keys.
    """

    keys: torch.Tensor
    values: torch.Tensor
    latent: bool = False

    def planes(self, slots: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Copies of what is stored at flat slots `[N]`, by the name of its plane."""
        keys = self.keys.flatten(0, 1)[slots]
        return {"latents": keys} if self.latent else {"keys": keys, "values": self.values.flatten(0, 1)[slots]}

    def write(self, slots: torch.Tensor, planes: Mapping[str, torch.Tensor]) -> None:
        """Store what `planes` gave at flat slots `[N]`.

        Raises:
            ValueError: a plane is missing or of another shape; the message names it.
        """
        pools = {"latents": self.keys} if self.latent else {"keys": self.keys, "values": self.values}
        for name, pool in pools.items():
            plane = planes.get(name)
            shape = (len(slots), *pool.shape[2:])
            if plane is None or plane.shape != shape or plane.dtype != pool.dtype:
                raise ValueError(f"{name} are not {shape} of {pool.dtype}")
            pool.flatten(0, 1)[slots] = plane

    @property
    def bytes_per_token(self) -> int:
        """What one token takes."""
        return self.keys[0, 0].nbytes + (0 if self.latent else self.values[0, 0].nbytes)


@dataclass(frozen=True, slots=True)
class Heads:
    """q `[N, Hq, D]` and k `[N, Hkv, D]`, both unrotated, and k ahead of its norm; v `[N, Hkv, Dv]`, None where k holds it.

    gate: what the output is gated with, ahead of its sigmoid `[N, Hq, Dv]`, None where the family has none. expansion: what
    every head makes of k, for which q stands then; None where k is the key itself.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    gate: torch.Tensor | None = None
    expansion: Expansion | None = None

    @property
    def stored_q(self) -> torch.Tensor:
        """Queries for keys as they are stored."""
        return self.q if self.expansion is None else self.expansion.absorb(self.q)


class AttentionProjection(Protocol):
    """A family's way into attention and out of it."""

    @property
    def scale(self) -> float:
        """The factor on `q·k`."""
        ...

    @property
    def key_norm(self) -> KeyNorm | None:
        """What keys are normed with on their way into pages, None where they are not."""
        ...

    def project(self, hidden: torch.Tensor) -> Heads:
        """Normed hidden states `[N, hidden]` to heads."""
        ...

    def output(self, mixed: torch.Tensor, heads: Heads) -> torch.Tensor:
        """Attention's outputs `[N, Hq, Dv]` to `[N, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One layer with its page pool. rotary turns the first channels of queries and keys; None without position."""

    projection: AttentionProjection
    rotary: Rotary | None
    pool: PagePool

    def capture(self, hidden: torch.Tensor, batch: CaptureBatch) -> torch.Tensor:
        """See `Mixer`; keys are stored rotated by their place inside the segment."""
        return self._run(hidden, batch.queries, batch.write_slots, batch.base)

    def combine(self, hidden: torch.Tensor, batch: CombineBatch) -> torch.Tensor:
        """See `Mixer`; live keys are stored rotated by their true position."""
        return self._run(hidden, batch.queries, batch.write_slots, 0)

    def decode(self, hidden: torch.Tensor, batch: DecodeBatch) -> torch.Tensor:
        """See `Mixer`."""
        return self._run(hidden, batch.queries, batch.write_slots, 0)

    def _run(self, hidden: torch.Tensor, queries: PagedQueries, slots: torch.Tensor, base: int) -> torch.Tensor:
        heads, pools = self.projection.project(hidden), (self.pool.keys, self.pool.values)
        form = KeyForm(self.projection.key_norm, self.rotary)
        page_store.store(FreshTokens(heads.k, heads.v, slots), queries, base, pools, form)
        shape = AttentionShape(self.projection.scale, self.rotary)
        if heads.expansion is None:
            mixed = paged_attention.attend(heads.q, queries, pools, shape)
        else:
            mixed = latent_attention.attend(heads.q, queries, pools, shape, heads.expansion)
        return self.projection.output(mixed, heads)
