"""The attention kernel of latents against dense fp64 attention: keys hold their values, all heads share them."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from services.worker.ops import device as kernel_devices
from services.worker.ops.paged_attention import AttentionShape, PagedQueries, chunked, dispatch, naive, padded, work
from services.worker.ops.paged_attention import triton as grouped_kernels
from services.worker.ops.paged_attention import triton_latent as kernels
from services.worker.ops.paged_attention.launch import FixedLaunch, fixed_launches
from services.worker.ops.rotary import Rotary
from tests.exactness import test_paged_attention as rig
from tests.exactness.rig import assert_close, assert_far
from tests.exactness.test_paged_attention import Heads, Scene, dense, draw_queries, draw_scene

TOLERANCE = 1e-5
PARTS = [(3, 20), (5, 33), (4, 0)]
# Positional channels that turn ahead of 13, 32 and 40 of latents, none, and heads that do not fit in one tile.
TURNED, WHOLE, PLAIN = Heads(3, 1, 19, 13, 6), Heads(4, 1, 48, 32, 16), Heads(5, 1, 44, 40, 0)
MANY, TRUE = Heads(18, 1, 20, 16, 4), Heads(32, 1, 576, 512, 64)


def _scene(parts: list[tuple[int, int]], heads: Heads, seed: int, shift: int = 0) -> Scene:
    """Values are the last channels of the keys, whose positional channels stand ahead of them."""
    drawn = draw_scene(parts, heads, seed, shift)
    width = heads.value_dim
    return replace(drawn, values=drawn.keys[..., -width:], true_values=drawn.true_keys[..., -width:])


def _asked(scenes: list[Scene], device: torch.device, is_fixed: bool = False) -> PagedQueries:
    live = [scene.live for scene in scenes]
    ends = torch.tensor([len(own) for own in live]).cumsum(0).tolist()
    places = torch.cat(live)
    tables = [scene.table for scene in scenes]
    return PagedQueries(places.to(device), (0, *ends), tables, on_host=places.tolist(), is_fixed=is_fixed)


def _attend(
    form: ModuleType,
    scene: Scene,
    queries: torch.Tensor,
    asked: PagedQueries,
    heads: Heads,
    interleaved: bool = False,
) -> torch.Tensor:
    """Over the pool of a scene; values are a view of the keys."""
    device = asked.positions.device
    keys = scene.keys.to(device)
    rotary = Rotary.create(rig.THETA, heads.rotary_dim, device, interleaved) if heads.rotary_dim else None
    shape = AttentionShape(heads.head_dim**-0.5, rotary)
    pools = (keys, keys[..., -heads.value_dim :])
    attended: torch.Tensor = form.attend(queries.float().to(device), asked, pools, shape)
    return attended


@pytest.mark.parametrize(
    ("heads", "split_keys"),
    [(TURNED, 16), (TURNED, 48), (TURNED, 2048), (WHOLE, 48), (PLAIN, 16), (MANY, 2048)],
    ids=str,
)
def test_equals_dense_attention(
    heads: Heads, split_keys: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Pages are poisoned, partial at every part's end, and scattered; nothing behind a query may weigh in."""
    monkeypatch.setattr(work, "MIN_SPLIT_KEYS", split_keys)
    scene = _scene(PARTS, heads, 5)
    queries = draw_queries(scene, heads, 6)
    expected = dense(scene, queries, heads)
    assert_close(_attend(kernels, scene, queries, _asked([scene], device), heads), expected, TOLERANCE)
    assert_far(_attend(kernels, scene, queries.roll(1, 1), _asked([scene], device), heads), expected, TOLERANCE)
    if heads.rotary_dim:
        shifted = _scene(PARTS, heads, 5, shift=1)
        assert_far(_attend(kernels, shifted, queries, _asked([shifted], device), heads), expected, TOLERANCE)


def test_whole_pages_need_no_mask(device: torch.device) -> None:
    """Bodies with whole pages, pages that only the later queries see whole, and more queries than a tile."""
    scene = _scene([(3, 100), (40, 40), (25, 0)], WHOLE, 15)
    queries = draw_queries(scene, WHOLE, 16)
    actual = _attend(kernels, scene, queries, _asked([scene], device), WHOLE)
    assert_close(actual, dense(scene, queries, WHOLE), TOLERANCE)


def test_slots_that_are_not_written_yet(device: torch.device) -> None:
    """The last page counts tokens behind every query, whose slots hold whatever was there."""
    scene = _scene(PARTS, TURNED, 9)
    for _ in range(7):
        scene.table.grow_last()
    queries = draw_queries(scene, TURNED, 10)
    actual = _attend(kernels, scene, queries, _asked([scene], device), TURNED)
    assert_close(actual, dense(scene, queries, TURNED), TOLERANCE)


def test_pairs_of_neighbours_turn(device: torch.device) -> None:
    """Interleaved rotary against the naive form, which half-split rotary is far from."""
    scene = _scene(PARTS, TURNED, 13)
    written = replace(scene, keys=scene.keys.nan_to_num())
    queries = draw_queries(scene, TURNED, 14)
    expected = _attend(naive, written, queries, _asked([scene], device), TURNED, interleaved=True)
    actual = _attend(kernels, written, queries, _asked([scene], device), TURNED, interleaved=True)
    assert_close(actual, expected, TOLERANCE)
    other = _attend(kernels, written, queries, _asked([scene], device), TURNED, interleaved=False)
    assert_far(other, expected, TOLERANCE)


@pytest.mark.parametrize(
    ("dtype", "heads", "parts"),
    [
        (torch.bfloat16, WHOLE, [(3, 100), (40, 40), (25, 0)]),
        (torch.float16, WHOLE, [(3, 100), (40, 40), (25, 0)]),
        (torch.bfloat16, TRUE, [(2, 100), (3, 0)]),
        (torch.float32, TRUE, [(1, 40), (2, 0)]),
    ],
    ids=str,
)
def test_precisions(dtype: torch.dtype, heads: Heads, parts: list[tuple[int, int]], device: torch.device) -> None:
    """Tiles of a token's heads and those of its neighbours, and keys of several pages a step; the channels of released models."""
    scene = _scene(parts, heads, 17)
    queries = draw_queries(scene, heads, 18).to(dtype)
    shape = AttentionShape(heads.head_dim**-0.5, Rotary.create(rig.THETA, heads.rotary_dim, device))
    keys = scene.keys.to(device, dtype)
    actual = kernels.attend(queries.to(device), _asked([scene], device), (keys, keys[..., -heads.value_dim :]), shape)
    rounded = replace(scene, keys=keys.float())
    expected = _attend(chunked, rounded, queries.float(), _asked([scene], device), heads)
    assert actual.dtype is dtype
    tolerance = TOLERANCE if dtype is torch.float32 else 2e-2
    assert_close(actual.float(), expected, tolerance)
    assert_far(actual.float().roll(1, 0), expected, tolerance)


@pytest.mark.parametrize("split_pages", [1, 2, 50])
def test_requests_of_uneven_length(split_pages: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """One query, a long prompt and a short one in one launch, some blocks split and others whole."""
    monkeypatch.setattr(work, "_split_pages", lambda *_: split_pages)
    whole = _scene([(20, 90), (9, 40), (3, 0)], TURNED, 21)
    scenes = [replace(whole, live=whole.live[:end]) for end in (1, 32, 20)]
    queries = [draw_queries(scene, TURNED, 22) for scene in scenes]
    actual = _attend(kernels, whole, torch.cat(queries), _asked(scenes, device), TURNED)
    expected = torch.cat([dense(scene, own, TURNED) for scene, own in zip(scenes, queries, strict=True)])
    assert_close(actual, expected, TOLERANCE)
    assert_far(actual.roll(1, 0), expected, TOLERANCE)


def test_a_fixed_launch_takes_over_longer_tables(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """What a recorded step replays: the same tensors, refilled as requests grow, until they have no room left."""
    monkeypatch.setattr(work, "MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr(rig, "NUM_PAGES", 90)
    scenes = [_scene([(2, body), (1, 0)], TURNED, 13) for body in (40, 130, 1300)]
    scenes = [replace(scene, live=scene.live[-1:]) for scene in scenes]
    queries = [draw_queries(scene, TURNED, 14) for scene in scenes]
    asked = [_asked([scene], device, is_fixed=True) for scene in scenes]
    _attend(kernels, scenes[0], queries[0], asked[0], TURNED)
    prepared: dict[str, FixedLaunch] = fixed_launches(asked[0])
    (launch,) = prepared.values()
    for index in (0, 1, 0, 1):
        assert launch.refresh(asked[index])
        again = PagedQueries(asked[index].positions, (0, 1), (), is_fixed=True, prepared={**prepared})
        actual = _attend(kernels, scenes[index], queries[index], again, TURNED)
        assert_close(actual, dense(scenes[index], queries[index], TURNED), TOLERANCE)
    assert not launch.refresh(asked[2])


def test_which_form_takes_which_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents are told from keys that merely look like them by where their values lie."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: True)

    def form(keys: torch.Tensor, values: torch.Tensor) -> ModuleType:
        return dispatch._form(torch.zeros(2, 4, keys.shape[-1]), (keys, values))

    latents = torch.zeros(3, 16, 1, 576)
    assert form(latents, latents[..., -512:]) is kernels
    assert form(latents[..., :40], latents[..., 8:40]) is kernels
    narrow = torch.zeros(3, 16, 1, 40)
    assert form(narrow, narrow[..., -32:].clone()) is grouped_kernels
    assert form(narrow, narrow[..., :32]) is grouped_kernels
    several = torch.zeros(3, 16, 2, 40)
    assert form(several, several[..., -32:]) is grouped_kernels
    for latent_dim, positional in ((513, 16), (512, 65)):
        wide = torch.zeros(3, 16, 1, latent_dim + positional)
        assert form(wide, wide[..., -latent_dim:]) is chunked
    assert form(latents, latents[..., -512:].clone()) is chunked
    for page_tokens in (8, 24):
        odd = torch.zeros(3, page_tokens, 1, 576)
        assert form(odd, odd[..., -512:]) is chunked
    monkeypatch.setattr(dispatch, "has_kernels", kernel_devices.has_kernels)
    assert form(latents, latents[..., -512:]) is chunked


def test_a_gpu_without_kernels_attends_over_latents(device: torch.device) -> None:
    """The padded form reads the same pools."""
    scene = _scene(PARTS, PLAIN, 25)
    queries = draw_queries(scene, PLAIN, 26)
    actual = _attend(padded, scene, queries, _asked([scene], device), PLAIN)
    assert_close(actual, dense(scene, queries, PLAIN), TOLERANCE)


@pytest.mark.parametrize(
    ("heads", "expected"), [(1, (1, 1)), (32, (32, 1)), (96, (48, 2)), (128, (64, 2)), (67, (1, 67))]
)
def test_heads_of_a_tile(heads: int, expected: tuple[int, int]) -> None:
    tiles = kernels._head_tiles(heads, is_half=True)
    assert (tiles.group, tiles.count) == expected
