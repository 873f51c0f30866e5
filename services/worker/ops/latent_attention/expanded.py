"""The op over keys and values of every head, which are made of the latents of the pages that the queries see.

A product of a query and a key then has P and V channels instead of C twice, which pays where every key meets hundreds of
queries: in captures and recomputes. Any float dtype.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from services.worker.ops.columns import send_columns
from services.worker.ops.latent_attention.types import Expansion
from services.worker.ops.paged_attention import AttentionShape, PagedQueries, PageRow, PageRun, PageTable
from services.worker.ops.paged_attention import dispatch as paged_attention

__all__ = ["attend", "is_cheaper"]

# Keys and values of as many heads at once as fit in so many bytes.
ROOM_BYTES = 256 << 20
# Making keys and values costs so much more than their operations alone: they are written and read once more.
_OVERHEAD = 2


def is_cheaper(asked: PagedQueries, expansion: Expansion) -> bool:
    """Whether what queries and keys save is more than making keys and values costs; the same in every layer of a pass."""
    return asked.prepare(f"expands {expansion.latent_dim}", lambda: _saves(asked, expansion))


def _saves(asked: PagedQueries, expansion: Expansion) -> bool:
    made = expansion.plain_dim + expansion.value_dim
    pairs = sum(place + 1 for place in asked.places())
    keys = sum(table.page_size * len(entry.pages) for table in asked.tables for entry in table.entries)
    return pairs * (2 * expansion.latent_dim - made) > _OVERHEAD * keys * expansion.latent_dim * made


@dataclass(frozen=True, slots=True)
class _View:
    """The pages of a pass's tables, in order, and its queries over tables that number them so."""

    pages: torch.Tensor
    asked: PagedQueries

    @classmethod
    def of(cls, asked: PagedQueries) -> "_View":
        entries = [entry for table in asked.tables for entry in table.entries]
        pages = list(dict.fromkeys(page for entry in entries for page in entry.pages))
        number = {page: index for index, page in enumerate(pages)}
        tables = [_renumber(table, number) for table in asked.tables]
        (sent,) = send_columns([pages], asked.positions.device, torch.int64)
        return cls(sent, replace(asked, tables=tables, prepared={}))


def _renumber(table: PageTable, number: dict[int, int]) -> PageTable:
    renumbered = PageTable(table.page_size)
    for entry in table.entries:
        pages = tuple(number[page] for page in entry.pages)
        own: PageRow | PageRun = (
            replace(entry, pages=pages) if isinstance(entry, PageRun) else replace(entry, page=pages[0])
        )
        renumbered.extend([own])
    return renumbered


def attend(
    queries: torch.Tensor,
    asked: PagedQueries,
    pools: tuple[torch.Tensor, torch.Tensor],
    shape: AttentionShape,
    expansion: Expansion,
) -> torch.Tensor:
    """As `absorbed.attend`."""
    view = asked.prepare("expanded", lambda: _View.of(asked))
    stored = pools[0][view.pages]
    outputs = queries.new_empty(*queries.shape[:2], expansion.value_dim)
    token_bytes = stored.itemsize * (queries.shape[-1] + expansion.value_dim)
    for heads in _runs(queries.shape[1], ROOM_BYTES // (token_bytes * stored.shape[0] * stored.shape[1])):
        made = _make(stored, expansion.of_heads(heads))
        outputs[:, heads] = paged_attention.attend(queries[:, heads], view.asked, made, shape)
    return outputs


def _runs(count: int, most: int) -> Iterator[slice]:
    """Heads in as few runs as there is room for, of about equal length."""
    num_runs = -(-count // max(1, most))
    size = -(-count // num_runs)
    return (slice(begin, min(begin + size, count)) for begin in range(0, count, size))


def _make(stored: torch.Tensor, expansion: Expansion) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[pages, page_size, H, R + P]` and values of stored keys `[pages, page_size, 1, R + C]`."""
    positional, latents = stored.tensor_split([-expansion.latent_dim], dim=-1)
    size, heads = stored.shape[:2], len(expansion.key_up)
    keys = stored.new_empty(*size, heads, positional.shape[-1] + expansion.plain_dim)
    keys[..., : positional.shape[-1]] = positional
    keys[..., positional.shape[-1] :] = F.linear(latents[:, :, 0], expansion.key_up.flatten(0, 1)).unflatten(
        -1, (heads, -1)
    )
    values = F.linear(latents[:, :, 0], expansion.value_up.transpose(1, 2).flatten(0, 1))
    return keys, values.unflatten(-1, (heads, -1))
