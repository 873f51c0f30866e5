"""The kernels of routed experts against the naive form, and of their CPU form, on sizes that fill no tile."""

from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch

from services.worker.ops.routed_swiglu import Choice, SharedTerm, grouped, naive
from services.worker.ops.routed_swiglu import triton as kernels
from tests.exactness.rig import assert_close, assert_far

TOLERANCE = 1e-5
NUM_EXPERTS, TOP = 5, 3


@dataclass(frozen=True, slots=True)
class Block:
    """Arguments of one call."""

    hidden: torch.Tensor
    choice: Choice
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: SharedTerm | None = None
    residual: torch.Tensor | None = None

    def run(self, form: ModuleType) -> torch.Tensor:
        outputs: torch.Tensor = form.feed_forward(
            self.hidden, self.choice, self.gate_up, self.down, self.shared, self.residual
        )
        return outputs


def _draw(
    tokens: int, device: torch.device, hidden: int = 37, size: int = 21, dtype: torch.dtype = torch.float32
) -> Block:
    """Every expert but one is chosen, the first most of the time."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, NUM_EXPERTS, generator=generator)
    scores[:, 0] += 0.5
    scores[:, 3] = -1.0
    choice = Choice(
        scores.argsort(dim=-1, descending=True)[:, :TOP].to(device, torch.int32),
        torch.rand(tokens, TOP, generator=generator).to(device),
    )

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return Block(
        normal(tokens, hidden), choice, normal(NUM_EXPERTS, 2 * size, hidden), normal(NUM_EXPERTS, hidden, size)
    )


@pytest.fixture(params=[grouped, kernels], ids=lambda form: form.__name__.rpartition(".")[2])
def form(request: pytest.FixtureRequest) -> ModuleType:
    chosen: ModuleType = request.param
    return chosen


def test_one_expert_a_token(form: ModuleType, device: torch.device) -> None:
    """The first choices of several are a view whose flat form is not contiguous."""
    block = _draw(7, device)
    first = replace(block, choice=Choice(block.choice.experts[:, :1], block.choice.weights[:, :1]))
    assert_close(first.run(form), first.run(naive), TOLERANCE)
    assert_far(first.run(form), block.run(naive), TOLERANCE)


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_equals_the_naive_form(form: ModuleType, tokens: int, device: torch.device) -> None:
    block = _draw(tokens, device)
    assert_close(block.run(form), block.run(naive), TOLERANCE)


def _draw_shared(block: Block, gated: bool) -> SharedTerm:
    """Rows and logits that are slices of wider ones."""
    tokens, channels = block.hidden.shape
    drawn = torch.randn(tokens, channels + 4, generator=torch.Generator().manual_seed(1)).to(block.hidden)
    return SharedTerm(drawn[:, :channels], drawn[:, channels + 1].float() if gated else None)


@pytest.mark.parametrize("gated", [True, False])
def test_a_shared_block_is_added(form: ModuleType, gated: bool, device: torch.device) -> None:
    block = _draw(7, device)
    shared = replace(block, shared=_draw_shared(block, gated))
    assert_close(shared.run(form), shared.run(naive), TOLERANCE)
    assert_far(shared.run(form), block.run(naive), TOLERANCE)
    other = replace(block, shared=_draw_shared(block, not gated))
    assert_far(other.run(form), shared.run(naive), TOLERANCE)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_residual_is_added(form: ModuleType, stride: int, device: torch.device) -> None:
    """Rows that stand apart, or whose channels do."""
    block = replace(_draw(7, device), shared=_draw_shared(_draw(7, device), gated=True))
    tokens, channels = block.hidden.shape
    wide = torch.randn(tokens, stride * channels + 3, generator=torch.Generator().manual_seed(3)).to(block.hidden)
    added = replace(block, residual=wide[:, : stride * channels : stride])
    assert_close(added.run(form), added.run(naive), TOLERANCE)
    assert_far(added.run(form), block.run(naive), TOLERANCE)


def test_a_shared_block_is_rounded_with_the_experts(device: torch.device) -> None:
    """Parts that cancel leave what a sum of rounded sums would have lost."""
    block = _draw(7, device, dtype=torch.float16)
    mixed = block.run(kernels)
    cancelled = replace(block, shared=SharedTerm(-mixed)).run(kernels)
    assert bool((cancelled != 0).any())
    assert float(cancelled.abs().max()) <= 2**-10 * float(mixed.abs().max())


WRONG = {
    "expert": lambda block: replace(
        block, choice=Choice((block.choice.experts + 1) % NUM_EXPERTS, block.choice.weights)
    ),
    "weight": lambda block: replace(block, choice=Choice(block.choice.experts, block.choice.weights.flip(1))),
    "token": lambda block: replace(block, hidden=block.hidden.roll(1, 0)),
    "halves": lambda block: replace(block, gate_up=block.gate_up.roll(block.gate_up.shape[1] // 2, 1)),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_controls(mistake: str, device: torch.device) -> None:
    block = _draw(7, device)
    assert_far(WRONG[mistake](block).run(kernels), block.run(naive), TOLERANCE)


def test_sizes_over_the_edge_of_a_tile(device: torch.device) -> None:
    block = _draw(9, device, hidden=130, size=67)
    assert_close(block.run(kernels), block.run(naive), TOLERANCE)


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_half_precision_in_every_tile(rows: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Within what rounding the activations and every expert's part costs; the interpreter multiplies no bf16."""
    half, tolerance = (torch.bfloat16, 1e-2) if device.type == "cuda" else (torch.float16, 2e-3)
    block = _draw(21, device, dtype=half)
    sized = {16: 1, 32: 20 * NUM_EXPERTS, 64: 50 * NUM_EXPERTS, 128: 300 * NUM_EXPERTS}[rows]
    chosen = kernels._Tiles.of(sized, NUM_EXPERTS, half)
    assert chosen.rows == rows
    monkeypatch.setattr(kernels._Tiles, "of", lambda *_: chosen)
    actual = block.run(kernels)
    assert actual.dtype == half
    wide = replace(block, hidden=block.hidden.float(), gate_up=block.gate_up.float(), down=block.down.float())
    assert_close(actual, wide.run(naive), tolerance)


@pytest.mark.parametrize("tokens", [1, 70, 256, 300])
def test_many_pairs_are_ordered_alike(tokens: int, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """One block of pairs, three full ones, and others whose last is not full."""
    experts = _draw(tokens, device).choice.experts
    few = kernels._Order.of(experts, NUM_EXPERTS)
    monkeypatch.setattr(kernels, "_MOST_PAIRS_READ", 0)
    many = kernels._Order.of(experts, NUM_EXPERTS)
    flat = experts.flatten()
    assert torch.equal(few.pairs.long(), flat.argsort(stable=True))
    assert torch.equal(few.pairs, many.pairs)
    assert torch.equal(few.firsts, many.firsts)
    assert few.firsts.diff().tolist() == flat.bincount(minlength=NUM_EXPERTS).tolist()


def test_rows_that_another_row_poisons_stay_clean(device: torch.device) -> None:
    """A tile's neighbours, and what lies behind its end, never weigh in."""
    block = _draw(12, device)
    poisoned = block.hidden.clone()
    poisoned[4] = float("nan")
    actual, expected = replace(block, hidden=poisoned).run(kernels), block.run(kernels)
    assert bool(actual[4].isnan().all())
    others = [row for row in range(12) if row != 4]
    assert torch.equal(actual[others], expected[others])


def test_weights_of_another_dtype_are_refused(device: torch.device) -> None:
    block = _draw(2, device)
    with pytest.raises(ValueError, match="of the hidden states' dtype"):
        replace(block, down=block.down.bfloat16()).run(kernels)
