"""The attention kernel against dense fp64 attention, with long tables split over several programs and without."""

import pytest
import torch

from services.worker.ops.paged_attention import triton as kernels
from tests.exactness.rig import assert_close, assert_far
from tests.exactness.test_paged_attention import HEADS, PLAIN, Heads, attend_scenes, dense, draw_queries, draw_scene

TOLERANCE = 1e-5
PARTS = [(3, 20), (5, 33), (4, 0)]
WIDE = Heads(8, 1, 72, 40, 24)


@pytest.mark.parametrize("heads", [HEADS, PLAIN, WIDE], ids=str)
@pytest.mark.parametrize("split_pages", [1, 3, 128])
def test_equals_dense_attention(
    heads: Heads, split_pages: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(kernels, "SPLIT_PAGES", split_pages)
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


@pytest.mark.parametrize("heads", [HEADS, PLAIN], ids=str)
def test_slots_that_are_not_written_yet(heads: Heads, device: torch.device) -> None:
    """The last page counts tokens behind every query, whose slots hold whatever was there."""
    scene = draw_scene(PARTS, heads, 9)
    for _ in range(7):
        scene.table.grow_last()
    queries = draw_queries(scene, heads, 10)
    assert_close(attend_scenes(kernels, [scene], [queries], heads, device), dense(scene, queries, heads), TOLERANCE)
