"""Paged attention, every form, against dense fp64 attention: odd sizes, partial pages, several bases, grouped heads."""

from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.ops.paged_attention import AttentionShape, PagedQueries, PageRow, PageTable, chunked, naive, padded
from services.worker.ops.rotary import Rotary
from tests.exactness.reference import attend, rotate
from tests.exactness.rig import assert_close, assert_far

PAGE_SIZE, NUM_PAGES, THETA = 16, 64, 1e4
TOLERANCE = 1e-5


@pytest.fixture(params=[naive, chunked, padded], ids=lambda form: form.__name__.rpartition(".")[2], scope="module")
def form(request: pytest.FixtureRequest) -> ModuleType:
    chosen: ModuleType = request.param
    return chosen


@dataclass(frozen=True, slots=True)
class Heads:
    """num_heads query heads of head_dim channels over num_kv_heads; value_dim channels of a value."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rotary_dim: int


@dataclass(frozen=True, slots=True)
class Scene:
    """One prompt in pages: its parts' lengths, which are stored (with a window) and which are live."""

    table: PageTable
    keys: torch.Tensor
    values: torch.Tensor
    true_keys: torch.Tensor
    true_values: torch.Tensor
    live: torch.Tensor


HEADS = Heads(6, 2, 10, 7, 4)
PLAIN = Heads(3, 3, 8, 8, 0)


def draw_scene(parts: list[tuple[int, int]], heads: Heads, seed: int, shift: int = 0) -> Scene:
    """Parts as (live tokens, body tokens); a body's keys are stored rotated by their place in the part, off by `shift`.

    Live runs share pages, one behind the other; bodies have pages of their own.
    """
    generator = torch.Generator().manual_seed(seed)
    length = sum(map(sum, parts))
    true_keys = torch.randn(length, heads.num_kv_heads, heads.head_dim, generator=generator, dtype=torch.float64)
    true_values = torch.randn(length, heads.num_kv_heads, heads.value_dim, generator=generator, dtype=torch.float64)
    keys = torch.full((NUM_PAGES, PAGE_SIZE, heads.num_kv_heads, heads.head_dim), float("nan"))
    values = torch.full((NUM_PAGES, PAGE_SIZE, heads.num_kv_heads, heads.value_dim), float("nan"))
    free = torch.randperm(NUM_PAGES, generator=generator).tolist()
    table, position, live = PageTable(PAGE_SIZE), 0, list[int]()
    live_page, taken = free.pop(), 0
    for num_live, num_body in parts:
        start = position
        live.extend(range(start, start + num_live))
        for end, base, is_live in ((start + num_live, 0, True), (start + num_live + num_body, start, False)):
            while position < end:
                if is_live and taken == PAGE_SIZE:
                    live_page, taken = free.pop(), 0
                page, offset = (live_page, taken) if is_live else (free.pop(), 0)
                row = PageRow(page, base, position, min(PAGE_SIZE - offset, end - position), offset)
                places, slots = torch.arange(position, position + row.count), list(row.slots(PAGE_SIZE))
                turned = rotate(true_keys[places], places - base + shift * (base > 0), THETA, heads.rotary_dim)
                keys.flatten(0, 1)[slots] = turned.float()
                values.flatten(0, 1)[slots] = true_values[places].float()
                table.extend([row])
                position += row.count
                taken += row.count if is_live else 0
    return Scene(table, keys, values, true_keys, true_values, torch.tensor(live))


def attend_scenes(
    form: ModuleType, scenes: list[Scene], queries: list[torch.Tensor], heads: Heads, device: torch.device
) -> torch.Tensor:
    """All scenes share the first one's pools, so only scenes drawn into one pool may come together."""
    rotary = Rotary.create(THETA, heads.rotary_dim, device) if heads.rotary_dim else None
    cu_queries = [0]
    for scene in scenes:
        cu_queries.append(cu_queries[-1] + len(scene.live))
    result: torch.Tensor = form.attend(
        torch.cat(queries).float().to(device),
        PagedQueries(
            torch.cat([scene.live for scene in scenes]).to(device),
            cu_queries,
            [scene.table for scene in scenes],
            on_host=[place for scene in scenes for place in scene.live.tolist()],
        ),
        (scenes[0].keys.to(device), scenes[0].values.to(device)),
        AttentionShape(heads.head_dim**-0.5, rotary),
    )
    return result


def dense(scene: Scene, queries: torch.Tensor, heads: Heads) -> torch.Tensor:
    places = torch.arange(len(scene.true_keys))
    return attend(
        rotate(queries, scene.live, THETA, heads.rotary_dim),
        rotate(scene.true_keys, places, THETA, heads.rotary_dim),
        scene.true_values,
        places[None] <= scene.live[:, None],
        heads.head_dim**-0.5,
    )


def draw_queries(scene: Scene, heads: Heads, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(scene.live), heads.num_heads, heads.head_dim, generator=generator, dtype=torch.float64)


@settings(max_examples=60)
@given(
    parts=st.lists(st.tuples(st.integers(1, 11), st.integers(0, 30)), min_size=1, max_size=5),
    heads=st.sampled_from([HEADS, PLAIN, Heads(4, 1, 6, 9, 6)]),
    seed=st.integers(0, 1000),
)
def test_equals_dense_attention(
    form: ModuleType, device: torch.device, parts: list[tuple[int, int]], heads: Heads, seed: int
) -> None:
    """Pages are poisoned, partial at every part's end, and scattered; nothing behind a query may weigh in."""
    scene = draw_scene(parts, heads, seed)
    queries = draw_queries(scene, heads, seed + 1)
    assert_close(attend_scenes(form, [scene], [queries], heads, device), dense(scene, queries, heads), TOLERANCE)


def test_a_key_rotated_one_place_off_is_seen(form: ModuleType, device: torch.device) -> None:
    parts = [(3, 20), (5, 33), (4, 0)]
    scene, off = draw_scene(parts, HEADS, 5), draw_scene(parts, HEADS, 5, shift=1)
    queries = draw_queries(scene, HEADS, 6)
    assert_close(attend_scenes(form, [scene], [queries], HEADS, device), dense(scene, queries, HEADS), TOLERANCE)
    assert_far(attend_scenes(form, [off], [queries], HEADS, device), dense(scene, queries, HEADS), TOLERANCE)


def test_long_query_runs(device: torch.device) -> None:
    """More queries than one block of the chunked form, with a stored body between two live runs."""
    scene = draw_scene([(150, 40), (141, 0)], HEADS, 7)
    queries = draw_queries(scene, HEADS, 8)
    assert_close(attend_scenes(chunked, [scene], [queries], HEADS, device), dense(scene, queries, HEADS), TOLERANCE)


def test_requests_of_one_call_are_apart(form: ModuleType, device: torch.device) -> None:
    """Two prompts that share a page, in one call, each as if alone."""
    scene = draw_scene([(2, 19), (3, 0)], HEADS, 9)
    shared = [row for row in scene.table.rows if row.base == 0 and row.first < 2]
    alone = replace(
        scene,
        table=PageTable(PAGE_SIZE),
        true_keys=scene.true_keys[:2],
        true_values=scene.true_values[:2],
        live=torch.arange(2),
    )
    alone.table.extend(shared)
    queries = [draw_queries(scene, HEADS, 10), draw_queries(alone, HEADS, 11)]
    both = attend_scenes(form, [scene, alone], queries, HEADS, device)
    assert_close(both[:5], dense(scene, queries[0], HEADS), TOLERANCE)
    assert_close(both[5:], dense(alone, queries[1], HEADS), TOLERANCE)


def test_rows_must_rise_within_a_base() -> None:
    table = PageTable(PAGE_SIZE)
    table.extend([PageRow(0, 0, 8, 8)])
    with pytest.raises(ValueError, match="stands behind"):
        table.extend([PageRow(1, 0, 4, 8)])


def test_growing_a_table_token_by_token(form: ModuleType, device: torch.device) -> None:
    """Decode enters one token at a time; the joined spans must say what the rows say."""
    scene = draw_scene([(21, 0)], PLAIN, 12)
    rows = scene.table.rows
    grown = PageTable(PAGE_SIZE)
    for row in rows:
        grown.extend([replace(row, count=1)])
        for _ in range(row.count - 1):
            grown.grow_last()
    assert grown.rows == rows
    assert grown.groups() == scene.table.groups()
