"""Latent attention, absorbed and expanded, against the textbook form: rotary of either pairing or none."""

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.nn.functional as F

from services.worker.mixers.batch import CombineBatch
from services.worker.mixers.latent_attention import LatentAttention, LatentAttentionShape, LatentAttentionWeights
from services.worker.mixers.paged_attention import PagedAttention
from services.worker.mixers.state import DeviceMemory
from services.worker.ops.latent_attention import Expansion, dispatch, expanded
from services.worker.ops.layout import PartWalk
from services.worker.ops.paged_attention import AttentionShape, PagedQueries, PageRow, PageTable
from services.worker.ops.rotary import Rotary
from tests.exactness.reference import attend, rotate
from tests.exactness.rig import assert_close, assert_far

HIDDEN, TOKENS, PAGE_SIZE, THETA = 24, 37, 8, 1e4
NUM_PAGES = -(-TOKENS // PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class Case:
    """query_rank as in the shape; interleaved: None without rotary."""

    query_rank: int | None
    interleaved: bool | None

    @property
    def shape(self) -> LatentAttentionShape:
        theta = None if self.interleaved is None else THETA
        return LatentAttentionShape(3, 10, 6, 7, 13, self.query_rank, theta, 1e-6)


def _weights(shape: LatentAttentionShape) -> LatentAttentionWeights:
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) / math.sqrt(size[-1])

    queries = shape.num_heads * shape.query_dim
    rank = shape.query_rank
    return LatentAttentionWeights(
        in_proj=draw((rank or queries) + shape.latent_dim + shape.rope_dim, HIDDEN),
        latent_norm=1 + draw(shape.latent_dim),
        key_up=draw(shape.num_heads, shape.nope_dim, shape.latent_dim),
        value_up=draw(shape.num_heads, shape.latent_dim, shape.value_dim),
        out_proj=draw(HIDDEN, shape.num_heads * shape.value_dim),
        query_norm=None if rank is None else 1 + draw(rank),
        query_up=None if rank is None else draw(queries, rank),
    )


def _paged(case: Case, weights: LatentAttentionWeights, hidden: torch.Tensor, device: torch.device) -> torch.Tensor:
    """One live run through a poisoned pool whose pages stand in reverse."""
    shape = case.shape
    memory = DeviceMemory(device, torch.float32, NUM_PAGES, PAGE_SIZE, num_slots=1)
    pool = memory.add_page_pool(shape.kept)
    pool.keys.fill_(float("nan"))
    rotary = None
    if case.interleaved is not None:
        rotary = Rotary.create(THETA, shape.rope_dim, device, case.interleaved)
    table = PageTable(PAGE_SIZE)
    starts = range(0, TOKENS, PAGE_SIZE)
    table.extend(
        PageRow(NUM_PAGES - 1 - page, 0, first, min(PAGE_SIZE, TOKENS - first)) for page, first in enumerate(starts)
    )
    positions = torch.arange(TOKENS, device=device)
    slots = (NUM_PAGES - 1 - positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE
    walk = PartWalk((0, TOKENS), (0, 1))
    queries = PagedQueries(positions, (0, TOKENS), [table])
    batch = CombineBatch(walk, queries, slots, torch.zeros(1), [None], [TOKENS])
    layer = PagedAttention(LatentAttention(shape, _moved(weights, device)), rotary, pool)
    return layer.combine(hidden.to(device), batch)


def _moved(weights: LatentAttentionWeights, device: torch.device) -> LatentAttentionWeights:
    tensors = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return replace(weights, **{name: own.to(device) for name, own in tensors.items() if own is not None})


def _norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _turn(positional: torch.Tensor, interleaved: bool | None) -> torch.Tensor:
    """Interleaved pairs turn as half-split ones do once even channels stand ahead of odd ones."""
    if interleaved is None:
        return positional
    places = torch.arange(TOKENS)
    if not interleaved:
        return rotate(positional, places, THETA, positional.shape[-1])
    return rotate(torch.cat([positional[..., 0::2], positional[..., 1::2]], -1), places, THETA, positional.shape[-1])


def _textbook(case: Case, weights: LatentAttentionWeights, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    shape = case.shape
    projected = F.linear(hidden.double(), weights.in_proj.double())
    queries, latent, positional = projected.tensor_split([-shape.latent_dim - shape.rope_dim, -shape.rope_dim], dim=-1)
    if weights.query_up is not None and weights.query_norm is not None:
        queries = _norm(queries, weights.query_norm.double()) @ weights.query_up.double().T
    latent = _norm(latent, weights.latent_norm.double())
    q = queries.unflatten(-1, (shape.num_heads, -1))
    keys = torch.einsum("nc,hdc->nhd", latent, weights.key_up.double())
    shared = _turn(positional[:, None], case.interleaved).expand(-1, shape.num_heads, -1)
    places = torch.arange(TOKENS)
    mixed = attend(
        torch.cat([q[..., : shape.nope_dim], _turn(q[..., shape.nope_dim :], case.interleaved)], -1),
        torch.cat([keys, shared], -1),
        torch.einsum("nc,hcv->nhv", latent, weights.value_up.double()),
        places[None] <= places[:, None],
        scale,
    )
    return F.linear(mixed.flatten(1), weights.out_proj.double())


@pytest.mark.parametrize("interleaved", [None, False, True], ids=["unturned", "half-split", "interleaved"])
@pytest.mark.parametrize("query_rank", [None, 11], ids=["full", "ranked"])
@pytest.mark.parametrize("is_expanded", [False, True], ids=["absorbed", "expanded"])
def test_equals_textbook(
    is_expanded: bool,
    query_rank: int | None,
    interleaved: bool | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys and values of one head at a time, where they are expanded."""
    shapes = list[torch.Size]()
    make = expanded._make

    def note(stored: torch.Tensor, expansion: Expansion) -> tuple[torch.Tensor, torch.Tensor]:
        made = make(stored, expansion)
        shapes.append(made[0].shape)
        return made

    monkeypatch.setattr(dispatch, "takes_kernel", lambda *sizes: True)
    monkeypatch.setattr(expanded, "is_cheaper", lambda *asked: is_expanded)
    monkeypatch.setattr(expanded, "ROOM_BYTES", 4 * TOKENS * 30)
    monkeypatch.setattr(expanded, "_make", note)
    case = Case(query_rank, interleaved)
    weights = _weights(case.shape)
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    actual = _paged(case, weights, hidden, device)
    assert shapes == [torch.Size((NUM_PAGES, PAGE_SIZE, 1, case.shape.query_dim))] * (3 if is_expanded else 0)
    assert_close(actual, _textbook(case, weights, hidden, 16**-0.5), 1e-5)
    others = [Case(query_rank, other) for other in (None, False, True) if other is not interleaved]
    for other in others:
        assert_far(actual, _textbook(other, weights, hidden, 16**-0.5), 1e-5)
    assert_far(actual, _textbook(case, weights, hidden, 10**-0.5), 1e-5)


def _asked(keys: int, queries: int, pages: int = NUM_PAGES) -> PagedQueries:
    """The last queries of a prompt."""
    table = PageTable(PAGE_SIZE)
    table.extend(PageRow(page, 0, page * PAGE_SIZE, PAGE_SIZE) for page in range(pages))
    places = list(range(keys - queries, keys))
    return PagedQueries(torch.tensor(places), (0, queries), [table], on_host=places)


def test_latents_are_expanded_where_many_queries_meet_them() -> None:
    """Kimi-Linear's channels: a whole segment of 2,048 tokens, not the live tokens of a prompt over stored ones."""
    true = Expansion(torch.empty(32, 128, 512), torch.empty(32, 512, 128))
    assert expanded.is_cheaper(_asked(2048, 2048, 256), true)
    assert not expanded.is_cheaper(_asked(32768, 192, 4096), true)
    assert not expanded.is_cheaper(_asked(256, 256, 32), true)


def test_recorded_passes_are_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tables change behind what was recorded, and with them what would have to be expanded."""
    monkeypatch.setattr(dispatch, "takes_kernel", lambda *sizes: True)
    monkeypatch.setattr(expanded, "is_cheaper", lambda *asked: True)
    keys = torch.randn(NUM_PAGES, PAGE_SIZE, 1, 19)
    up = Expansion(torch.randn(3, 10, 13), torch.randn(3, 13, 7))
    given = (torch.randn(4, 3, 16), _asked(TOKENS, 4), (keys, keys[..., -13:]), AttentionShape(0.25, None), up)
    expected = dispatch.attend(*given)
    monkeypatch.setattr(expanded, "attend", lambda *given: pytest.fail("a recorded pass is expanded"))
    recorded = (given[0], replace(given[1], is_fixed=True, prepared={}), *given[2:])
    assert_close(dispatch.attend(*recorded), expected, 1e-5)
