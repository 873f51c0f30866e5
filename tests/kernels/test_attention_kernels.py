"""The attention kernel against dense fp64 attention, with long tables split over several programs and without."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.states import SegmentState
from services.worker.ops.paged_attention import AttentionShape, PagedQueries, PageRow, PageTable, naive, work
from services.worker.ops.paged_attention import triton as kernels
from services.worker.ops.paged_attention.launch import FixedLaunch, fixed_launches
from services.worker.ops.rotary import Rotary
from tests.exactness import test_paged_attention as rig
from tests.exactness.rig import assert_close, assert_far
from tests.exactness.test_paged_attention import HEADS, PLAIN, Heads, attend_scenes, dense, draw_queries, draw_scene

TOLERANCE = 1e-5
PARTS = [(3, 20), (5, 33), (4, 0)]
WIDE = Heads(8, 1, 72, 40, 24)
# Heads of which a half, a third or a quarter turns stand in two or three tiles; the widest take one page a step.
PIECES = [
    Heads(4, 2, 32, 20, 12),
    Heads(2, 2, 48, 16, 16),
    Heads(3, 3, 48, 16, 0),
    Heads(4, 2, 64, 64, 16),
    Heads(2, 1, 256, 32, 64),
    Heads(2, 1, 128, 16, 0),
]


@pytest.mark.parametrize("heads", [HEADS, PLAIN, WIDE], ids=str)
@pytest.mark.parametrize("split_keys", [16, 48, 2048])
def test_equals_dense_attention(
    heads: Heads, split_keys: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(work, "MIN_SPLIT_KEYS", split_keys)
    scene = draw_scene(PARTS, heads, 5)
    queries = draw_queries(scene, heads, 6)
    expected = dense(scene, queries, heads)
    assert_close(attend_scenes(kernels, [scene], [queries], heads, device), expected, TOLERANCE)
    if heads.rotary_dim:
        shifted = draw_scene(PARTS, heads, 5, shift=1)
        assert_far(attend_scenes(kernels, [shifted], [queries], heads, device), expected, TOLERANCE)


@pytest.mark.parametrize(("heads", "split_keys"), [*((heads, 2048) for heads in PIECES), (PIECES[3], 64)], ids=str)
def test_only_some_channels_turn(
    heads: Heads, split_keys: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Bodies with whole pages and pages that only the later queries see whole."""
    monkeypatch.setattr(work, "MIN_SPLIT_KEYS", split_keys)
    parts = [(3, 100), (20, 40), (25, 0)]
    scene = draw_scene(parts, heads, 15)
    queries = draw_queries(scene, heads, 16)
    expected = dense(scene, queries, heads)
    assert_close(attend_scenes(kernels, [scene], [queries], heads, device), expected, TOLERANCE)
    if heads.rotary_dim:
        shifted = draw_scene(parts, heads, 15, shift=1)
        assert_far(attend_scenes(kernels, [shifted], [queries], heads, device), expected, TOLERANCE)


def test_more_queries_than_a_tile(device: torch.device) -> None:
    scene = draw_scene([(70, 20), (9, 0)], HEADS, 7)
    queries = draw_queries(scene, HEADS, 8)
    actual = attend_scenes(kernels, [scene], [queries], HEADS, device)
    assert_close(actual, dense(scene, queries, HEADS), TOLERANCE)


def test_a_group_of_many_pages(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """More pages of one base than are counted at once, some of them behind the first query."""
    monkeypatch.setattr(rig, "NUM_PAGES", 80)
    monkeypatch.setattr(work, "MIN_SPLIT_KEYS", 2048)
    scene = draw_scene([(1, 1100), (2, 0)], HEADS, 11)
    queries = draw_queries(scene, HEADS, 12)
    assert_close(attend_scenes(kernels, [scene], [queries], HEADS, device), dense(scene, queries, HEADS), TOLERANCE)


@pytest.mark.parametrize("heads", [HEADS, PLAIN], ids=str)
def test_slots_that_are_not_written_yet(heads: Heads, device: torch.device) -> None:
    """The last page counts tokens behind every query, whose slots hold whatever was there."""
    scene = draw_scene(PARTS, heads, 9)
    for _ in range(7):
        scene.table.grow_last()
    queries = draw_queries(scene, heads, 10)
    assert_close(attend_scenes(kernels, [scene], [queries], heads, device), dense(scene, queries, heads), TOLERANCE)


def test_pairs_of_neighbours_turn(device: torch.device) -> None:
    """Interleaved rotary against the naive form, which half-split rotary is far from."""
    scene = draw_scene(PARTS, HEADS, 13)
    queries = draw_queries(scene, HEADS, 14).float().to(device)
    pools = (scene.keys.nan_to_num().to(device), scene.values.nan_to_num().to(device))
    results = []
    for form, interleaved in ((naive, True), (kernels, True), (naive, False)):
        asked = PagedQueries(scene.live.to(device), (0, len(scene.live)), (scene.table,))
        shape = AttentionShape(HEADS.head_dim**-0.5, Rotary.create(1e4, HEADS.rotary_dim, device, interleaved))
        results.append(form.attend(queries, asked, pools, shape))
    assert_close(results[1], results[0], TOLERANCE)
    assert_far(results[2], results[0], TOLERANCE)


@pytest.mark.parametrize("split_keys", [16, 2048])
def test_rows_cut_around_refreshed_blocks(
    split_keys: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A stored body begins and ends anywhere in its pages, with rows of the request's own between."""
    monkeypatch.setattr(work, "MIN_SPLIT_KEYS", split_keys)
    state = SegmentState((1,) * 65, 5, (), (1, 2, 3, 4))
    table = PageTable(16)
    table.extend([PageRow(0, 0, 0, 12), *state.rows_of(7, range(5, 20), 16), PageRow(5, 0, 27, 11)])
    table.extend([*state.rows_of(7, range(31, 43), 16), PageRow(5, 0, 50, 5, 11), PageRow(6, 0, 55, 6)])
    table.extend([*state.rows_of(7, range(54, 65), 16), PageRow(6, 0, 72, 9, 6)])
    places = [*range(12), *range(27, 38), *range(50, 61), *range(72, 81)]
    generator = torch.Generator().manual_seed(21)
    sizes = (HEADS.head_dim, HEADS.value_dim)
    keys, values = (torch.randn(8, 16, HEADS.num_kv_heads, size, generator=generator) for size in sizes)
    queries = torch.randn(len(places), HEADS.num_heads, HEADS.head_dim, generator=generator).to(device)
    asked = PagedQueries(torch.tensor(places, device=device), (0, len(places)), (table,))
    shape = AttentionShape(HEADS.head_dim**-0.5, Rotary.create(rig.THETA, HEADS.rotary_dim, device))
    pools = (keys.to(device), values.to(device))
    expected = naive.attend(queries, asked, pools, shape)
    assert_close(kernels.attend(queries, replace(asked, prepared={}), pools, shape), expected, TOLERANCE)
    stored = PageTable(16)
    stored.extend([PageRow(0, 0, 0, 12), state.rows(7), PageRow(6, 0, 72, 9, 6)])
    other = PagedQueries(asked.positions, asked.cu_queries, (stored,))
    assert_far(kernels.attend(queries, other, pools, shape), expected, TOLERANCE)


def test_a_fixed_launch_takes_over_longer_tables(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """What a recorded step replays: the same tensors, refilled as requests grow, until they have no room left."""
    monkeypatch.setattr(work, "MIN_SPLIT_KEYS", 16)
    shape = AttentionShape(HEADS.head_dim**-0.5, Rotary.create(rig.THETA, HEADS.rotary_dim, device))
    monkeypatch.setattr(rig, "NUM_PAGES", 90)
    scenes = [draw_scene([(2, body), (1, 0)], HEADS, 13) for body in (40, 130, 1300)]
    asked = [PagedQueries(scene.live[-1:].to(device), (0, 1), [scene.table], is_fixed=True) for scene in scenes]
    queries = [draw_queries(scene, HEADS, 14)[-1:].float().to(device) for scene in scenes]
    pools = [(scene.keys.to(device), scene.values.to(device)) for scene in scenes]
    kernels.attend(queries[0], asked[0], pools[0], shape)
    prepared = fixed_launches(asked[0])
    (launch,) = prepared.values()
    for index in (0, 1, 0, 1):
        assert launch.refresh(asked[index])
        again = PagedQueries(asked[index].positions, (0, 1), (), is_fixed=True, prepared={**prepared})
        actual = kernels.attend(queries[index], again, pools[index], shape)
        expected = naive.attend(queries[index], asked[index], pools[index], shape)
        assert_close(actual, expected, TOLERANCE)
    assert not launch.refresh(asked[2])
    kept = PagedQueries(asked[1].positions, (0, 1), (), is_fixed=True, prepared={**prepared})
    assert_close(kernels.attend(queries[1], kept, pools[1], shape), expected, TOLERANCE)


def _programs(asked: PagedQueries, tiles: work.Tiles) -> list[list[int]]:
    """The fields of every program."""
    fields: list[list[int]] = work.Work.cut(asked, tiles).columns[0].reshape(-1, work.BLOCK_FIELDS).tolist()
    return fields


def _seen_rows(cut: work.Work, program: list[int], farthest: int) -> list[tuple[int, int, int]]:
    """Base, first slot and first position of every row that a program goes through."""
    _, bases, cu_rows, slots, firsts, _, _ = cut.columns
    return [
        (int(bases[group]), int(slots[row]), int(firsts[row]))
        for group in range(*program[2:4])
        for row in range(max(cu_rows[group], program[4]), min(cu_rows[group + 1], program[5]))
        if firsts[row] <= farthest
    ]


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    tokens=st.integers(1, 9),
    split_pages=st.integers(1, 7),
)
def test_programs_see_every_visible_page_once(
    prompts: list[list[tuple[int, int]]], tokens: int, split_pages: int
) -> None:
    """Every block's programs together: what is visible and nothing else, in even splits, the longest program first."""
    scenes = [draw_scene(parts, PLAIN, seed) for seed, parts in enumerate(prompts)]
    cu_queries = [0, *np.cumsum([len(scene.live) for scene in scenes]).tolist()]
    places = torch.cat([scene.live for scene in scenes])
    asked = PagedQueries(places, cu_queries, [scene.table for scene in scenes])
    cut = work.Work.cut(asked, work.Tiles(16, tokens, split_pages))
    seen: dict[tuple[int, int], list[list[tuple[int, int, int]]]] = {}
    lengths = []
    for program in _programs(asked, work.Tiles(16, tokens, split_pages)):
        rows = _seen_rows(cut, program, int(places[program[1] - 1]))
        lengths.append(len(rows))
        seen.setdefault((program[0], program[1]), []).append(rows)
    assert lengths == sorted(lengths, reverse=True)
    for request, scene in enumerate(scenes):
        for begin in range(cu_queries[request], cu_queries[request + 1], tokens):
            end = min(begin + tokens, cu_queries[request + 1])
            splits = seen.pop((begin, end))
            behind = places[end - 1]
            visible = [
                (row.base, row.slots(rig.PAGE_SIZE).start, row.first) for row in scene.table.rows if row.first <= behind
            ]
            assert sorted(row for rows in splits for row in rows) == sorted(visible)
            assert len(splits) == -(-len(visible) // split_pages)
            assert max(map(len, splits)) - min(map(len, splits)) <= 1
    assert not seen


def test_whole_blocks_have_no_partial_rows() -> None:
    """Of two blocks, the first sees one page and the second five: two splits of up to three."""
    scene = draw_scene([(4, 60), (4, 0)], PLAIN, 3)
    asked = PagedQueries(scene.live, (0, 8), [scene.table])
    cut = work.Work.cut(asked, work.Tiles(16, 4, 3))
    assert cut.columns[-1][:9].tolist() == [0, 0, 0, 0, 0, 2, 4, 6, 8]
    assert cut.num_partial == 8
    assert [(program[0], *program[6:]) for program in _programs(asked, work.Tiles(16, 4, 3))] == [
        (4, 0, 2),
        (4, 1, 2),
        (0, 0, 1),
    ]


def test_splits_fill_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest splits that make no more programs than wanted; blocks that are more by themselves are left whole."""
    monkeypatch.setattr(work, "MIN_SPLIT_KEYS", 16)
    scene = draw_scene([(8, 500), (8, 300), (8, 0)], PLAIN, 4)
    asked = PagedQueries(scene.live, (0, 24), [scene.table])
    heads = work.HeadTiles(1, 3, 128)
    for wanted in (12, 30, 60, 10**6):
        monkeypatch.setattr(work, "PROGRAMS", wanted)
        tiles = work.Tiles.of(asked, heads, 16)
        assert 3 * len(_programs(asked, tiles)) <= wanted
        if tiles.split_pages > 1:
            shorter = replace(tiles, split_pages=tiles.split_pages - 1)
            assert 3 * len(_programs(asked, shorter)) > wanted
    monkeypatch.setattr(work, "PROGRAMS", 1)
    assert work.Work.cut(asked, work.Tiles.of(asked, heads, 16)).num_partial == 0


def test_a_query_that_sees_no_key_is_refused() -> None:
    scene = draw_scene([(4, 0)], PLAIN, 3)
    asked = PagedQueries(torch.tensor([-1]), (0, 1), [scene.table])
    with pytest.raises(ValueError, match="sees no key"):
        work.Work.cut(asked, work.Tiles(16, 1, 1))


@pytest.mark.parametrize("split_pages", [1, 2, 50])
def test_requests_of_uneven_length(split_pages: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """One query, a long prompt and a short one in one launch, some blocks split and others whole."""
    monkeypatch.setattr(work, "_split_pages", lambda *_: split_pages)
    whole = draw_scene([(20, 90), (9, 40), (3, 0)], HEADS, 21)
    ends = (1, 20, 32)
    scenes = [replace(whole, live=whole.live[:end]) for end in ends]
    lengths = [int(scene.live[-1]) + 1 for scene in scenes]
    for index, length in enumerate(lengths):
        table = PageTable(rig.PAGE_SIZE)
        table.extend(row for row in whole.table.rows if row.first < length)
        scenes[index] = replace(
            scenes[index], table=table, true_keys=whole.true_keys[:length], true_values=whole.true_values[:length]
        )
    queries = [draw_queries(scene, HEADS, 22) for scene in scenes]
    actual = attend_scenes(kernels, scenes, queries, HEADS, device)
    expected = torch.cat([dense(scene, own, HEADS) for scene, own in zip(scenes, queries, strict=True)])
    assert_close(actual, expected, TOLERANCE)
    assert_far(actual.roll(1, 0), expected, TOLERANCE)


def test_a_fixed_launch_follows_a_request_from_page_to_page(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Token by token over two edges of pages, as a recorded step is replayed, with splits that move with the length."""
    monkeypatch.setattr(work, "MIN_SPLIT_KEYS", 32)
    shape = AttentionShape(HEADS.head_dim**-0.5, Rotary.create(rig.THETA, HEADS.rotary_dim, device))
    scene = draw_scene([(2, 50), (40, 0)], HEADS, 23)
    queries = draw_queries(scene, HEADS, 24).float().to(device)
    pools = (scene.keys.to(device), scene.values.to(device))
    table, rows = PageTable(rig.PAGE_SIZE), list(scene.table.rows)
    table.extend([*rows[:-3], replace(rows[-3], count=1)])
    launch: FixedLaunch | None = None
    prepared: dict[str, FixedLaunch] = {}
    for index, place in enumerate(scene.live.tolist()[2:], start=2):
        if place == rows[len(table.rows) - 1].first + rows[len(table.rows) - 1].count:
            table.extend([replace(rows[len(table.rows)], count=1)])
        elif index > 2:
            table.grow_last()
        if index > 2 and table.rows[-1].count % rig.PAGE_SIZE > 1:
            continue
        asked = PagedQueries(torch.tensor([place], device=device), (0, 1), [table], on_host=[place], is_fixed=True)
        query = queries[index : index + 1]
        expected = naive.attend(query, asked, pools, shape)
        if launch is None:
            assert_close(kernels.attend(query, asked, pools, shape), expected, TOLERANCE)
            prepared = fixed_launches(asked)
            (launch,) = prepared.values()
        assert launch.refresh(asked)
        again = PagedQueries(asked.positions, (0, 1), (), is_fixed=True, prepared={**prepared})
        assert_close(kernels.attend(query, again, pools, shape), expected, TOLERANCE)
    assert len(table.rows) == len(rows)
