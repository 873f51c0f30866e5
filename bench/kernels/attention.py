"""Paged attention: the live queries of a combine pass, and decoding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from types import ModuleType

import torch

from bench.kernels.case import Case, Timed, draw
from services.worker.ops.paged_attention import AttentionShape, PagedQueries, PageRow, PageTable, chunked, naive
from services.worker.ops.paged_attention import triton as kernels
from services.worker.ops.rotary import Rotary

__all__ = ["small_cases", "true_cases"]


@dataclass(frozen=True, slots=True)
class _Heads:
    queries: int
    keys: int
    channels: int
    rotary: int


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
    num_pages = 1 + max(row.page for table in tables for row in table.rows)
    pool = (num_pages, setting.page_size, heads.keys, heads.channels)
    keys, values = draw(*pool, device=device, dtype=dtype), draw(*pool, device=device, dtype=dtype).roll(1, 0)
    queries = draw(len(flat), heads.queries, heads.channels, device=device, dtype=dtype)
    shape = AttentionShape(heads.channels**-0.5, Rotary.create(1e7, heads.rotary, device))
    stored = sum(row.count for table in tables for row in table.rows)
    return Case(
        name,
        lambda: [kernels.attend(queries, asked, (keys, values), shape)],
        lambda: [setting.form.attend(queries.float(), asked, (keys.float(), values.float()), shape)],
        setting.tolerance,
        Timed(
            lambda: kernels.attend(queries, asked, (keys, values), shape),
            dtype.itemsize * heads.channels * 2 * (stored * heads.keys + len(flat) * heads.queries),
            4.0 * heads.queries * heads.channels * sum(place + 1 for place in flat),
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
    yield _case(f"attention, {len(live)} live queries over {prompt.length} keys", [combined], [live], heads, setting)
    for batch in batches:
        pages = count()
        tables = [prompt.table(setting.page_size, pages) for _ in range(batch)]
        name = f"attention, decoding, {batch} requests over {prompt.length} keys"
        yield _case(name, tables, [[prompt.length - 1]] * batch, heads, setting)


def small_cases(device: torch.device) -> Iterator[Case]:
    """Against the naive form."""
    setting = _Setting(naive, torch.float32, 1e-4, 16, device)
    yield from _cases(_Prompt(2, 3, 21, 5), (2,), _Heads(6, 2, 40, 12), setting)


def true_cases(device: torch.device) -> Iterator[Case]:
    """In bf16 against the padded form in fp32."""
    setting = _Setting(chunked, torch.bfloat16, 2e-2, 64, device)
    yield from _cases(_Prompt(16, 32, 2016, 64), (1, 64), _Heads(16, 2, 256, 64), setting)
