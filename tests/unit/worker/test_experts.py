"""Routed experts against a token-by-token reference in fp64, written from the published description of each routing."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from services.worker.mixers.state import DeviceMemory
from services.worker.models.checkpoint import CheckpointDirectory
from services.worker.models.decoder import SwiGlu
from services.worker.models.errors import CheckpointError
from services.worker.models.experts import ExpertNames, Experts, ExpertsShape, Routing, Scoring, stack_router
from services.worker.models.weights import WeightReader
from services.worker.ops.routing import choose
from tests.exactness.rig import assert_close, assert_far

ROUTINGS = {
    "softmax": Routing(5, 2, Scoring.SOFTMAX, renormalised=False),
    "renormalised": Routing(7, 3, Scoring.SOFTMAX, renormalised=True),
    "one": Routing(3, 1, Scoring.SOFTMAX, renormalised=True),
    "all": Routing(3, 3, Scoring.SOFTMAX, renormalised=True),
    "sigmoid": Routing(5, 2, Scoring.SIGMOID, renormalised=True, scale=2.446),
    "corrected": Routing(6, 2, Scoring.SIGMOID, renormalised=True, corrected=True, scale=2.5),
    "groups": Routing(12, 3, Scoring.SIGMOID, True, corrected=True, num_groups=4, top_groups=2, scale=2.5),
    "groups-of-one": Routing(4, 2, Scoring.SIGMOID, False, num_groups=4, top_groups=2),
}
HIDDEN, SIZE, SHARED = 9, 5, 7


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _experts(routing: Routing) -> Experts:
    count = routing.num_experts
    return Experts(
        routing=routing,
        router=stack_router(_draw(count, HIDDEN, seed=1), _draw(1, HIDDEN, seed=7)),
        bias=_draw(count, seed=2) if routing.corrected else None,
        gate_up=_draw(count, 2 * SIZE, HIDDEN, seed=3),
        down=_draw(count, HIDDEN, SIZE, seed=4),
        shared=SwiGlu(_draw(2 * SHARED, HIDDEN, seed=5), _draw(HIDDEN, SHARED, seed=6)),
        shared_gated=True,
    )


def _reference_weights(routing: Routing, logits: torch.Tensor, bias: torch.Tensor | None) -> dict[int, float]:
    """The weight of every expert that one token chooses: plain Python over plain numbers."""
    scores = logits.softmax(-1) if routing.scoring is Scoring.SOFTMAX else logits.sigmoid()
    wanted = [float(score) + (0.0 if bias is None else float(bias[expert])) for expert, score in enumerate(scores)]
    size = routing.num_experts // routing.num_groups
    groups = [range(first, first + size) for first in range(0, routing.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted(wanted[expert] for expert in group)[-2:]))
    candidates = sorted(expert for group in groups[: routing.top_groups] for expert in group)
    chosen = sorted(candidates, key=lambda expert: -wanted[expert])[: routing.top_k]
    total = sum(float(scores[expert]) for expert in chosen) if routing.renormalised else 1.0
    return {expert: routing.scale * float(scores[expert]) / total for expert in chosen}


def _block(row: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (gate_up.double() @ row).chunk(2)
    return down.double() @ (gate * gate.sigmoid() * up)


def _reference(experts: Experts, hidden: torch.Tensor) -> torch.Tensor:
    """The whole block, one token and one expert at a time."""
    outputs, count = [], experts.routing.num_experts
    for row in hidden.double():
        logits = experts.router.double() @ row
        weights = _reference_weights(experts.routing, logits[:count], experts.bias)
        output = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, weight in weights.items():
            output += weight * _block(row, experts.gate_up[expert], experts.down[expert])
        if experts.shared is not None:
            shared = _block(row, experts.shared.gate_up, experts.shared.down)
            output += logits[count].sigmoid() * shared if experts.shared_gated else shared
        outputs.append(output)
    return torch.stack(outputs)


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_the_reference(routing: Routing, tokens: int) -> None:
    experts, hidden = _experts(routing), _draw(tokens, HIDDEN, seed=8)
    variants = [experts, replace(experts, shared_gated=False), replace(experts, shared=None)]
    for variant in variants:
        assert_close(variant(hidden), _reference(variant, hidden), 1e-5)
    assert_far(variants[0](hidden), _reference(variants[1], hidden))
    assert_far(variants[1](hidden), _reference(variants[2], hidden))


IGNORED = {
    "renormalised": ("softmax", Routing(5, 2, Scoring.SOFTMAX, renormalised=True)),
    "scoring": ("renormalised", Routing(7, 3, Scoring.SIGMOID, renormalised=True)),
    "top_k": ("renormalised", Routing(7, 2, Scoring.SOFTMAX, renormalised=True)),
    "scale": ("groups", replace(ROUTINGS["groups"], scale=1.0)),
    "groups": ("groups", replace(ROUTINGS["groups"], num_groups=1, top_groups=1)),
    "top_groups": ("groups", replace(ROUTINGS["groups"], top_groups=1)),
}


@pytest.mark.parametrize("field", IGNORED)
def test_every_field_of_a_routing_is_seen(field: str) -> None:
    """Controls: a block that ignores one field is far from the reference."""
    name, ignorant = IGNORED[field]
    experts, hidden = _experts(ROUTINGS[name]), _draw(37, HIDDEN, seed=8)
    assert_far(replace(experts, routing=ignorant)(hidden), _reference(experts, hidden))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    routing = replace(ROUTINGS["corrected"], renormalised=False, scale=1.0)
    logits, bias = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0]]), torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0, 8.0])
    choice = choose(routing, logits, bias)
    assert choice.experts.tolist() == [[4, 5]]
    assert torch.equal(choice.weights, logits[:, 4:].sigmoid())


def test_of_equals_the_first_is_taken() -> None:
    flat = torch.zeros(3, 12)
    assert choose(replace(ROUTINGS["groups"], corrected=False), flat, None).experts.tolist() == [[0, 1, 2]] * 3
    assert choose(ROUTINGS["softmax"], flat[:, :5], None).experts.tolist() == [[0, 1]] * 3
    some = torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0]])
    assert choose(ROUTINGS["softmax"], some, None).experts.tolist() == [[1, 3]]


def test_scores_that_vanish_stay_finite() -> None:
    choice = choose(ROUTINGS["sigmoid"], torch.full((2, 5), -300.0), None)
    assert torch.equal(choice.weights, torch.zeros(2, 2))


@given(neighbours=st.lists(st.integers(0, 50), max_size=12), place=st.integers(0, 12))
def test_a_row_is_on_its_own(neighbours: list[int], place: int) -> None:
    """Whoever chooses the same experts, a row keeps its experts and its sum: nothing is ever full."""
    for routing in (ROUTINGS["renormalised"], ROUTINGS["groups"]):
        experts, row = _experts(routing), _draw(1, HIDDEN, seed=100)
        rows = [_draw(1, HIDDEN, seed=seed) for seed in neighbours]
        place = min(place, len(rows))
        packed = experts(torch.cat([*rows[:place], row, *rows[place:]]))[place]
        assert_close(packed, experts(row)[0], 1e-6)


def test_many_rows_of_one_expert() -> None:
    experts, row = _experts(ROUTINGS["one"]), _draw(1, HIDDEN, seed=8)
    assert_close(experts(row.expand(500, -1)), experts(row).expand(500, -1), 1e-6)


def test_half_precision_keeps_the_routing_in_fp32() -> None:
    """Logits a thousandth apart are one number in bf16: rounded, every token would take the first expert."""
    experts = _experts(ROUTINGS["one"])
    apart = experts.router[:1] + 1e-3 * torch.arange(3.0)[:, None] * experts.router[:1].sign()
    near = Experts(experts.routing, apart, None, experts.gate_up.bfloat16(), experts.down.bfloat16())
    hidden = experts.router[:1].sign().bfloat16()
    expected = _block(hidden[0].double(), near.gate_up[2], near.down[2])
    actual = near(hidden)
    assert actual.dtype == torch.bfloat16
    assert_close(actual[0], expected, 2e-2)
    assert torch.equal((apart @ hidden.float().T).bfloat16().argmax(), torch.tensor(0))


@pytest.mark.parametrize(
    "numbers",
    [(5, 6, 1, 1), (5, 0, 1, 1), (5, 2, 2, 1), (5, 2, 0, 1), (5, 2, 5, 1), (5, 2, 1, 2), (5, 2, 1, 0)],
    ids=str,
)
def test_an_impossible_routing_is_refused(numbers: tuple[int, int, int, int]) -> None:
    experts, top_k, groups, top_groups = numbers
    with pytest.raises(CheckpointError, match=r"config\.json: no token can choose"):
        Routing(experts, top_k, Scoring.SOFTMAX, True, num_groups=groups, top_groups=top_groups)


SHAPE = ExpertsShape(SIZE, ROUTINGS["groups"], SHARED, shared_gated=True)


def _tensors(shape: ExpertsShape, names: ExpertNames) -> dict[str, torch.Tensor]:
    """A block as checkpoints keep it expert by expert."""
    own = _experts(shape.routing)
    assert own.bias is not None
    assert own.shared is not None
    count = shape.routing.num_experts
    tensors = {
        names.router: own.router[:count],
        names.bias: own.bias,
        names.shared_gate: own.router[count : count + 1],
    }
    for half, weight in zip(("gate", "up"), own.shared.gate_up.chunk(2), strict=True):
        tensors[f"{names.shared}.{half}_proj.weight"] = weight
    tensors[f"{names.shared}.down_proj.weight"] = own.shared.down
    for expert in range(count):
        gate, up = own.gate_up[expert].chunk(2)
        for part, weight in ((names.gate, gate), (names.up, up), (names.down, own.down[expert])):
            tensors[f"experts.{expert}.{part}.weight"] = weight
    return {f"model.mlp.{name}": tensor.contiguous() for name, tensor in tensors.items()}


def _load(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    names: ExpertNames | None = None,
    shape: ExpertsShape = SHAPE,
    dtype: torch.dtype = torch.float32,
) -> Experts:
    """The block after it went through a file."""
    save_file({"model.embed": torch.zeros(1), **tensors}, directory / "model.safetensors")
    memory = DeviceMemory(torch.device("cpu"), dtype, num_pages=1, page_size=1, num_slots=1)
    with CheckpointDirectory(directory) as checkpoint:
        block = WeightReader(checkpoint, memory, ["model."], "embed").feed_forward("mlp", shape, HIDDEN, names)
    assert isinstance(block, Experts)
    return block


def _read(directory: Path, tensors: dict[str, torch.Tensor], names: ExpertNames | None = None) -> torch.Tensor:
    """What the block makes of some hidden states."""
    return _load(directory, tensors, names)(_draw(20, HIDDEN, seed=8))


EXPECTED = _experts(SHAPE.routing)


def test_experts_one_by_one(tmp_path: Path) -> None:
    expected = EXPECTED(_draw(20, HIDDEN, seed=8))
    others = ExpertNames("w1", "w3", "w2", "router.weight", "router.bias", "shared", "shared_sigmoid.weight")
    assert torch.equal(_read(tmp_path, _tensors(SHAPE, ExpertNames())), expected)
    assert torch.equal(_read(tmp_path, _tensors(SHAPE, others), others), expected)
    with pytest.raises(CheckpointError, match=r"model\.mlp\.gate\.weight is missing"):
        _read(tmp_path, _tensors(SHAPE, others))


def test_fused_experts(tmp_path: Path) -> None:
    tensors = {name: each for name, each in _tensors(SHAPE, ExpertNames()).items() if ".experts." not in name}
    tensors["model.mlp.experts.gate_up_proj"] = EXPECTED.gate_up
    tensors["model.mlp.experts.down_proj"] = EXPECTED.down
    assert torch.equal(_read(tmp_path, tensors), EXPECTED(_draw(20, HIDDEN, seed=8)))
    tensors["model.mlp.experts.gate_up_proj"] = EXPECTED.gate_up.transpose(1, 2).contiguous()
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj has shape \(12, 9, 10\)"):
        _read(tmp_path, tensors)


@pytest.mark.parametrize(("router_fp32", "kept"), [(True, torch.float32), (False, torch.bfloat16)])
def test_the_router_is_kept_as_its_family_multiplies_it(router_fp32: bool, kept: torch.dtype, tmp_path: Path) -> None:
    """Logits are fp32 of the matrix as it is kept: the shared block's gate is its next row, and it ends on whole vectors."""
    shape = replace(SHAPE, router_fp32=router_fp32)
    block = _load(tmp_path, _tensors(SHAPE, ExpertNames()), shape=shape, dtype=torch.bfloat16)
    assert block.router.dtype == kept
    assert block.router.shape == (16, HIDDEN)
    assert torch.equal(block.router, EXPECTED.router.to(kept))
    hidden = _draw(20, HIDDEN, seed=8).bfloat16()
    assert_close(block(hidden), _reference(block, hidden), 2e-2)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = _tensors(SHAPE, ExpertNames())
    del tensors["model.mlp.experts.11.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.mlp\.experts\.11\.up_proj\.weight is missing"):
        _read(tmp_path, tensors)


def test_parameters_are_counted() -> None:
    held = sum(tensor.numel() for tensor in _tensors(SHAPE, ExpertNames()).values())
    assert SHAPE.num_parameters(HIDDEN) == held
    assert held - SHAPE.num_active_parameters(HIDDEN) == (12 - 3) * 3 * SIZE * HIDDEN
