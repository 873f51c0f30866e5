"""The attention kernel against dense fp64 attention, with long tables split over several programs and without."""

import pytest
import torch

from services.worker.ops.paged_attention import AttentionShape, PagedQueries, naive, work
from services.worker.ops.paged_attention import triton as kernels
from services.worker.ops.rotary import Rotary
from tests.exactness import test_paged_attention as rig
from tests.exactness.rig import assert_close, assert_far
from tests.exactness.test_paged_attention import HEADS, PLAIN, Heads, attend_scenes, dense, draw_queries, draw_scene

TOLERANCE = 1e-5
PARTS = [(3, 20), (5, 33), (4, 0)]
WIDE = Heads(8, 1, 72, 40, 24)


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


def test_a_fixed_launch_takes_over_longer_tables(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """What a recorded step replays: the same tensors, refilled as requests grow, until they have no room left."""
    monkeypatch.setattr(work, "MIN_SPLIT_KEYS", 16)
    shape = AttentionShape(HEADS.head_dim**-0.5, Rotary.create(rig.THETA, HEADS.rotary_dim, device))
    monkeypatch.setattr(rig, "NUM_PAGES", 90)
    scenes = [draw_scene([(2, body), (1, 0)], HEADS, 13) for body in (40, 130, 1300)]
    asked = [PagedQueries(scene.live[-1:].to(device), (0, 1), [scene.table]) for scene in scenes]
    queries = [draw_queries(scene, HEADS, 14)[-1:].float().to(device) for scene in scenes]
    pools = [(scene.keys.to(device), scene.values.to(device)) for scene in scenes]
    kernels.attend(queries[0], asked[0], pools[0], shape)
    fixed = PagedQueries(asked[0].positions.clone(), (0, 1), [scenes[0].table])
    (launch,) = kernels.fix_launches(asked[0], fixed)
    prepared = dict(fixed.prepared)
    for index in (0, 1):
        assert launch.refresh(asked[index])
        again = PagedQueries(asked[index].positions, (0, 1), (), dict(prepared))
        actual = kernels.attend(queries[index], again, pools[index], shape)
        expected = naive.attend(queries[index], asked[index], pools[index], shape)
        assert_close(actual, expected, TOLERANCE)
    assert not launch.refresh(asked[2])
    kept = PagedQueries(asked[1].positions, (0, 1), (), dict(prepared))
    assert_close(kernels.attend(queries[1], kept, pools[1], shape), expected, TOLERANCE)
