"""The attention kernel over position-independent pages, beside the same kernel over pages rotated for one prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch

from bench.ceilings import median_seconds
from bench.gpu.rig import Rig
from bench.results import Row
from services.worker.mixers.grouped_attention import GroupedAttentionShape
from services.worker.ops.paged_attention import AttentionShape, PagedQueries, PageRow, PageTable
from services.worker.ops.paged_attention import dispatch as paged_attention
from services.worker.ops.rotary import Rotary

__all__ = ["measure"]

_TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class _Layer:
    """heads: query heads; pool: keys or values of one token; kernel: the op's own."""

    heads: int
    pool: tuple[int, int]
    kernel: AttentionShape


def measure(rig: Rig) -> Iterator[Row]:
    """Live queries of an all-hit prompt, and decode steps; the results of both forms are compared first."""
    layer, sizes = _layer(rig), rig.sizes
    rows = _rows(rig, count())
    live = _live_positions(rig)
    _check(rig, layer, rows, live)
    yield from _measure(rig, layer, [rows], [live], f"{len(live)} live queries over {sizes.prompt_tokens:,} keys")
    last = [rows[-1].first + rows[-1].count - 1]
    for batch in (1, sizes.readers):
        pages = count()
        tables = [_rows(rig, pages) for _ in range(batch)]
        name = f"a decode step of {batch} over {sizes.prompt_tokens:,} keys each"
        yield from _measure(rig, layer, tables, [last] * batch, name)


def _layer(rig: Rig) -> _Layer:
    shape = next(layer.mixer for layer in rig.spec.layers if isinstance(layer.mixer, GroupedAttentionShape))
    rotary = Rotary.create(shape.rotary_theta, shape.rotary_dim, rig.device)
    kernel = AttentionShape(shape.head_dim**-0.5, rotary)
    return _Layer(shape.num_heads, (shape.num_kv_heads, shape.head_dim), kernel)


def _rows(rig: Rig, pages: Iterator[int]) -> list[PageRow]:
    """Segments with their seam windows, and a question; bodies turned from their segment's start on."""
    sizes, rows, position = rig.sizes, list[PageRow](), 0
    body = sizes.segment_tokens - sizes.seam_window
    runs = [(sizes.seam_window, True), (body, False)] * sizes.segments + [(sizes.question_tokens, True)]
    for tokens, is_live in runs:
        base = 0 if is_live else position - sizes.seam_window
        for first in range(position, position + tokens, sizes.page_tokens):
            held = min(sizes.page_tokens, position + tokens - first)
            rows.append(PageRow(next(pages), base, first, held))
        position += tokens
    return rows


def _live_positions(rig: Rig) -> list[int]:
    """Those of seam windows and of the question."""
    sizes = rig.sizes
    starts = range(0, sizes.prompt_tokens, sizes.segment_tokens)
    question = range(sizes.prompt_tokens, sizes.prompt_tokens + sizes.question_tokens)
    return [*(start + offset for start in starts for offset in range(sizes.seam_window)), *question]


def _asked(rig: Rig, tables: Sequence[Sequence[PageRow]], positions: Sequence[Sequence[int]]) -> PagedQueries:
    built = []
    for rows in tables:
        table = PageTable(rig.sizes.page_tokens)
        table.extend(rows)
        built.append(table)
    flat = [place for own in positions for place in own]
    each = len(positions[0])
    return PagedQueries(torch.tensor(flat, device=rig.device), range(0, len(flat) + 1, each), built)


def _private(rows: Sequence[PageRow]) -> list[PageRow]:
    """The same pages as if they were rotated by their true positions."""
    return [replace(row, base=0) for row in rows]


def _measure(
    rig: Rig, layer: _Layer, tables: Sequence[Sequence[PageRow]], positions: Sequence[Sequence[int]], name: str
) -> Iterator[Row]:
    num_pages = 1 + max(row.page for rows in tables for row in rows)
    pool = (num_pages, rig.sizes.page_tokens, *layer.pool)
    keys, values = (torch.randn(pool, device=rig.device, dtype=rig.dtype) for _ in range(2))
    shape = (sum(len(own) for own in positions), layer.heads, layer.pool[1])
    queries = torch.randn(shape, device=rig.device, dtype=rig.dtype)
    shared, private = (
        median_seconds(partial(paged_attention.attend, queries, asked, (keys, values), layer.kernel), rig.device)
        for asked in (
            _asked(rig, tables, positions),
            _asked(rig, [_private(rows) for rows in tables], positions),
        )
    )
    yield Row(f"over position-independent pages, {name}", 1e6 * shared, "µs", better="lower")
    yield Row(f"over private rotated pages, {name}", 1e6 * private, "µs", better="lower")
    yield Row(f"slower over position-independent pages, {name}", 100 * (shared / private - 1), "%", 6.0, "lower")


def _check(rig: Rig, layer: _Layer, rows: Sequence[PageRow], positions: Sequence[int]) -> None:
    """Both forms say the same of the same keys, and not of each other's.

    Raises:
        RuntimeError: it is not so.
    """
    size = rig.sizes.page_tokens
    pool = ((1 + max(row.page for row in rows)) * size, *layer.pool)
    keys, values = (torch.randn(pool, device=rig.device) for _ in range(2))
    queries = torch.randn(len(positions), layer.heads, layer.pool[1], device=rig.device, dtype=rig.dtype)

    def attend(stored_for: Sequence[PageRow], asked_with: Sequence[PageRow]) -> torch.Tensor:
        places = torch.zeros(pool[0], dtype=torch.int64)
        for row in stored_for:
            own = row.first - row.base
            places[row.page * size : row.page * size + row.count] = torch.arange(own, own + row.count)
        rotated = keys if layer.kernel.rotary is None else layer.kernel.rotary.rotate(keys, places.to(rig.device))
        pools = [tensor.to(rig.dtype).unflatten(0, (-1, size)) for tensor in (rotated, values)]
        asked = _asked(rig, [asked_with], [positions])
        return paged_attention.attend(queries, asked, (pools[0], pools[1]), layer.kernel).float()

    private = _private(rows)
    expected = attend(private, private)
    right, wrong = (_error(attend(rows, asked_with), expected) for asked_with in (rows, private))
    tolerance = _TOLERANCE[rig.dtype]
    if not right <= tolerance or not wrong >= 10 * tolerance:
        raise RuntimeError(
            f"position-independent pages are off by {right:.1e}, and by {wrong:.1e} read as private ones"
        )


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the query that is farthest off: relative, since what a query sees much of is small."""
    off = (actual - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(off.max())
