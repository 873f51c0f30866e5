"""Paged attention: the live queries of a combine pass, and decoding; over keys and values, and over latents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from types import ModuleType

import torch

from bench.kernels.case import Case, Timed, draw
from services.worker.ops.paged_attention import AttentionShape, PagedQueries, PageRow, PageTable, chunked, naive
from services.worker.ops.paged_attention import triton as grouped_kernels
from services.worker.ops.paged_attention import triton_latent as latent_kernels
from services.worker.ops.rotary import Rotary

__all__ = ["small_cases", "true_cases"]


@dataclass(frozen=True, slots=True)
class _Heads:
    """Query and key heads; channels of a key, of which `rotary` turn; latent: the last ones that are its value, or None."""

    queries: int
    keys: int
    channels: int
    rotary: int
    latent: int | None = None

    @property
    def form(self) -> ModuleType:
        return grouped_kernels if self.latent is None else latent_kernels

    @property
    def value_channels(self) -> int:
        return self.latent or self.channels

    def pools(self, num_pages: int, setting: "_Setting") -> tuple[torch.Tensor, torch.Tensor]:
        size = (num_pages, setting.page_size, self.keys, self.channels)
        keys = draw(*size, device=setting.device, dtype=setting.dtype)
        return keys, keys.roll(1, 0) if self.latent is None else keys[..., -self.latent :]

    @property
    def stored_channels(self) -> int:
        """Of one token's keys and values."""
        return self.keys * (self.channels + (self.channels if self.latent is None else 0))


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Bodies of `body` tokens behind `live` live ones each, then `last` live ones."""

    bodies: int
    live: int
    body: int
    last: int

    @property
    def length(self) -> int:
        return self.bodies * (self.live + self.body) + self.last

    def table(self, page_size: int, pages: Iterator[int]) -> PageTable:
        """Every part on pages of its own, a body's keys turned from its part's start on."""
        table, position = PageTable(page_size), 0
        for tokens, is_live in [*[(self.live, True), (self.body, False)] * self.bodies, (self.last, True)]:
            base = 0 if is_live else position - self.live
            for first in range(position, position + tokens, page_size):
                table.extend([PageRow(next(pages), base, first, min(page_size, position + tokens - first))])
            position += tokens
        return table

    def live_positions(self) -> list[int]:
        """Where the live tokens stand."""
        starts = range(0, self.bodies * (self.live + self.body), self.live + self.body)
        last = range(self.length - self.last, self.length)
        return [*(place for start in starts for place in range(start, start + self.live)), *last]


def _case(
    name: str, tables: Sequence[PageTable], positions: Sequence[Sequence[int]], heads: _Heads, setting: "_Setting"
) -> Case:
    device, dtype = setting.device, setting.dtype
    flat = [place for own in positions for place in own]
    each = len(positions[0])
    asked = PagedQueries(
        torch.tensor(flat, device=device), range(0, (len(positions) + 1) * each, each), tables, on_host=flat
    )
    keys, values = heads.pools(1 + max(row.page for table in tables for row in table.rows), setting)
    queries = draw(len(flat), heads.queries, heads.channels, device=device, dtype=dtype)
    shape = AttentionShape(heads.channels**-0.5, Rotary.create(1e7, heads.rotary, device) if heads.rotary else None)
    stored = sum(row.count for table in tables for row in table.rows)
    channels = heads.channels + heads.value_channels
    return Case(
        name,
        lambda: [heads.form.attend(queries, asked, (keys, values), shape)],
        lambda: [setting.form.attend(queries.float(), asked, (keys.float(), values.float()), shape)],
        setting.tolerance,
        Timed(
            lambda: heads.form.attend(queries, asked, (keys, values), shape),
            dtype.itemsize * (stored * heads.stored_channels + len(flat) * heads.queries * channels),
            2.0 * heads.queries * channels * sum(place + 1 for place in flat),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Setting:
    form: ModuleType
    dtype: torch.dtype
    tolerance: float
    page_size: int
    device: torch.device


def _cases(prompt: _Prompt, batches: Sequence[int], heads: _Heads, setting: _Setting) -> Iterator[Case]:
    live = prompt.live_positions()
    combined = prompt.table(setting.page_size, count())
    kind = "attention" if heads.latent is None else f"latent attention of {heads.queries} heads"
    yield _case(f"{kind}, {len(live)} live queries over {prompt.length} keys", [combined], [live], heads, setting)
    for batch in batches:
        pages = count()
        tables = [prompt.table(setting.page_size, pages) for _ in range(batch)]
        name = f"{kind}, decoding, {batch} requests over {prompt.length} keys"
        yield _case(name, tables, [[prompt.length - 1]] * batch, heads, setting)


def small_cases(device: torch.device) -> Iterator[Case]:
    """Against the naive form."""
    setting = _Setting(naive, torch.float32, 1e-4, 16, device)
    for heads in (_Heads(6, 2, 40, 12), _Heads(6, 1, 40, 12, latent=24)):
        yield from _cases(_Prompt(2, 3, 21, 5), (2,), heads, setting)


def true_cases(device: torch.device) -> Iterator[Case]:
    """In bf16 against the chunked form in fp32: heads of Qwen3.5-35B, latents of Kimi-Linear and of Ring-2.5."""
    setting = _Setting(chunked, torch.bfloat16, 2e-2, 64, device)
    yield from _cases(_Prompt(16, 32, 2016, 64), (1, 64), _Heads(16, 2, 256, 64), setting)
    yield from _cases(_Prompt(16, 8, 2040, 64), (1, 64), _Heads(32, 1, 576, 0, latent=512), setting)
    yield from _cases(_Prompt(16, 8, 2040, 64), (), _Heads(64, 1, 576, 64, latent=512), setting)
