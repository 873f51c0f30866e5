"""Storing tokens in one launch, against the naive form: norms, both pairings, wider rows, latents, half precision."""

from dataclasses import dataclass, replace

import pytest
import torch

from services.worker.ops.page_store import FreshTokens, KeyForm, KeyNorm, dispatch, naive
from services.worker.ops.page_store import triton as kernels
from services.worker.ops.paged_attention import PagedQueries
from services.worker.ops.rotary import Rotary
from tests.exactness.rig import assert_close, assert_far

TOLERANCE = 1e-5
PAGES, PAGE_SIZE, EPS, BASE = 5, 16, 1e-3, 3


@dataclass(frozen=True, slots=True)
class Case:
    """Tokens, key heads, channels of keys and values, and how many turn, in which pairs."""

    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    interleaved: bool = False
    normed: bool = True


CASES = [
    Case(1, 2, 12, 12, 12),
    Case(7, 3, 10, 7, 4),
    Case(19, 2, 40, 24, 16, interleaved=True),
    Case(5, 1, 8, 8, 0),
    Case(9, 2, 6, 20, 6, normed=False),
    Case(4, 1, 9, 5, 0, normed=False),
]


@dataclass(frozen=True, slots=True)
class Scene:
    """Fresh tokens as slices of one projection, where they go, and in which form."""

    tokens: FreshTokens
    asked: PagedQueries
    form: KeyForm


def _draw(case: Case, device: torch.device) -> Scene:
    generator = torch.Generator().manual_seed(5)
    widths = [case.heads * case.key_dim, case.heads * case.value_dim]
    # Small numbers, so that the constant under the norm's root counts.
    projected = 0.05 * torch.randn(case.tokens, 3 + sum(widths), generator=generator)
    _, keys, values = projected.to(device).split([3, *widths], dim=-1)
    slots = torch.randperm(PAGES * PAGE_SIZE, generator=generator)[: case.tokens].to(device)
    places = torch.arange(case.tokens, device=device) * 3 + BASE
    weight = 1 + torch.randn(case.key_dim, generator=generator).to(device)
    rotary = Rotary.create(1e4, case.rotary_dim, device, case.interleaved) if case.rotary_dim else None
    tokens = FreshTokens(keys.unflatten(-1, (case.heads, -1)), values.unflatten(-1, (case.heads, -1)), slots)
    norm = KeyNorm(weight, EPS) if case.normed else None
    return Scene(tokens, PagedQueries(places, (0, case.tokens), ()), KeyForm(norm, rotary))


def _pools(case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a number that no token has: what is left alone is seen."""
    shape = (PAGES, PAGE_SIZE, case.heads)
    keys, values = (torch.full((*shape, channels), 7.0) for channels in (case.key_dim, case.value_dim))
    return keys.to(device, dtype), values.to(device, dtype)


def _expected(case: Case, scene: Scene, device: torch.device, base: int = BASE) -> tuple[torch.Tensor, torch.Tensor]:
    pools = _pools(case, device)
    naive.store(scene.tokens, scene.asked, base, pools, scene.form)
    return pools


def _stored(pool: torch.Tensor, scene: Scene) -> torch.Tensor:
    """What stands in the tokens' slots; all others are as they were."""
    flat = pool.flatten(0, 1)
    others = torch.ones(len(flat), dtype=torch.bool, device=pool.device)
    others[scene.tokens.slots] = False
    assert (flat[others] == 7.0).all()
    return flat[scene.tokens.slots]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_naive_form(case: Case, device: torch.device) -> None:
    scene, pools = _draw(case, device), _pools(case, device)
    kernels.store(scene.tokens, scene.asked, BASE, pools, scene.form)
    for actual, expected in zip(pools, _expected(case, scene, device), strict=True):
        assert_close(_stored(actual, scene), _stored(expected, scene), TOLERANCE)
    if case.rotary_dim:
        off = _expected(case, scene, device, base=BASE + 1)[0]
        assert_far(_stored(pools[0], scene), _stored(off, scene), TOLERANCE)


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_a_wrong_form_is_seen(case: Case, device: torch.device) -> None:
    scene = _draw(case, device)
    norm, rotary = scene.form.norm, scene.form.rotary
    assert norm is not None
    assert rotary is not None
    wrong = [
        KeyForm(None, rotary),
        KeyForm(replace(norm, eps=2 * EPS), rotary),
        KeyForm(replace(norm, weight=norm.weight.roll(1)), rotary),
        KeyForm(norm, None),
        KeyForm(norm, replace(rotary, interleaved=not rotary.interleaved)),
    ]
    expected = _stored(_expected(case, scene, device)[0], scene)
    for form in wrong:
        pools = _pools(case, device)
        kernels.store(scene.tokens, scene.asked, BASE, pools, form)
        assert_far(_stored(pools[0], scene), expected, TOLERANCE)


def test_latents_lie_in_the_keys(device: torch.device) -> None:
    """Values are the last channels of the keys: nothing is written through them."""
    case = Case(6, 1, 14, 10, 4, interleaved=True, normed=False)
    scene = _draw(case, device)
    latents = replace(scene.tokens, values=None)
    keys, expected = (_pools(case, device)[0] for _ in range(2))
    kernels.store(latents, scene.asked, BASE, (keys, keys[..., -10:]), scene.form)
    naive.store(latents, scene.asked, BASE, (expected, expected[..., -10:]), scene.form)
    assert_close(_stored(keys, scene), _stored(expected, scene), TOLERANCE)


def test_half_precision_is_rounded_once(device: torch.device) -> None:
    """Norm and rotation with a rounding each are further from the result in fp32."""
    case = CASES[2]
    scene = _draw(case, device)
    rounded = FreshTokens(scene.tokens.keys.half(), None, scene.tokens.slots)
    exact = replace(rounded, keys=rounded.keys.float())
    pools, twice = (_pools(case, device, torch.float16)[0] for _ in range(2))
    expected = _pools(case, device)[0]
    kernels.store(rounded, scene.asked, BASE, (pools, pools), scene.form)
    naive.store(exact, scene.asked, BASE, (expected, expected), scene.form)
    naive.store(rounded, scene.asked, BASE, (twice, twice), scene.form)
    once_error, twice_error = (
        float((_stored(pool, scene).float() - _stored(expected, scene)).abs().mean()) for pool in (pools, twice)
    )
    assert once_error < 0.8 * twice_error


def test_layers_share_the_turns_of_a_pass(device: torch.device) -> None:
    """Rotaries of equal frequencies look their turns up; another base or other frequencies have their own."""
    case = CASES[0]
    scene, pools = _draw(case, device), _pools(case, device)
    for theta, base in ((1e4, BASE), (1e4, BASE), (1e4, 0), (1e3, 0)):
        form = KeyForm(None, Rotary.create(theta, case.rotary_dim, device))
        kernels.store(scene.tokens, scene.asked, base, pools, form)
    assert len(scene.asked.prepared) == 3


def test_the_device_chooses_the_form(device: torch.device) -> None:
    case = CASES[1]
    scene, pools, expected = _draw(case, device), _pools(case, device), _pools(case, device)
    dispatch.store(scene.tokens, scene.asked, BASE, pools, scene.form)
    form = kernels if device.type == "cuda" else naive
    form.store(scene.tokens, scene.asked, BASE, expected, scene.form)
    assert torch.equal(pools[0], expected[0])
    assert torch.equal(pools[1], expected[1])
