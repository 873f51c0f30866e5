"""The training network computes what transformers computes from the exported checkpoint."""

import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from train.export import cut_weights, export, join_weights
from train.network import Network
from train.recurrence import unit_lower_inverse
from train.shape import ModelShape, Weights, new_weights

SHAPE = dataclasses.replace(ModelShape(), vocabulary=160, hidden=64, layers=4, inner=96)
ROWS, LENGTH = 2, 128


def exported(folder: Path) -> Weights:
    """Weights away from their initial values, rounded as the export rounds them."""
    weights = new_weights(SHAPE, 0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
            weight.copy_(weight.bfloat16())
    export(folder, SHAPE, weights, end_of_text=0, message_end=2)
    return weights


def test_losses_and_gradients_equal_the_public_implementation(tmp_path: Path) -> None:
    weights = exported(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, SHAPE.vocabulary, (ROWS * LENGTH,), generator=torch.Generator().manual_seed(2))
    targets, position = ids.roll(-1), torch.arange(LENGTH).repeat(ROWS)
    losses = Network(SHAPE, weights, torch.float32, compiled=False).losses(ids, targets, position, ROWS)
    expected = F.cross_entropy(model(ids.view(ROWS, LENGTH)).logits.flatten(0, 1), targets, reduction="none")
    assert (losses - expected).norm() <= 1e-4 * expected.norm()
    losses.mean().backward()
    expected.mean().backward()
    layer = model.model.layers[0].linear_attn
    for name, theirs in (("0.dt_bias", layer.dt_bias), ("0.a_log", layer.A_log), ("0.b", layer.in_proj_b.weight)):
        ours = weights[name].grad
        assert ours is not None
        assert (ours - theirs.grad).norm() <= 1e-3 * theirs.grad.norm()


def test_rows_do_not_see_each_other(tmp_path: Path) -> None:
    network = Network(SHAPE, exported(tmp_path), torch.float32, compiled=False)
    ids = torch.randint(0, SHAPE.vocabulary, (ROWS * LENGTH,), generator=torch.Generator().manual_seed(3))
    position = torch.arange(LENGTH).repeat(ROWS)
    changed = ids.clone()
    changed[:LENGTH] = changed[:LENGTH].flip(0)
    whole, other = network.hidden(ids, position, ROWS), network.hidden(changed, position, ROWS)
    assert torch.equal(whole[LENGTH:], other[LENGTH:])
    assert not torch.allclose(whole[:LENGTH], other[:LENGTH])


def test_the_inverse_and_its_gradient() -> None:
    lower = (torch.randn(3, 64, 64, dtype=torch.float64) * 0.2).tril(-1).requires_grad_()
    eye = torch.eye(64, dtype=torch.float64)
    ours, expected = unit_lower_inverse(lower), torch.linalg.inv(lower + eye)
    torch.testing.assert_close(ours, expected)
    probe = torch.randn_like(ours)
    (mine,) = torch.autograd.grad((ours * probe).sum(), lower)
    (theirs,) = torch.autograd.grad((expected * probe).sum(), lower)
    torch.testing.assert_close(mine, theirs)


def test_pieces_join_to_the_same_file(tmp_path: Path) -> None:
    exported(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    cut_weights(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    join_weights(tmp_path, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == whole
