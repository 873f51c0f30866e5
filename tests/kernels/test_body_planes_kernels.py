"""What is kept of captured bodies, the kernel against the naive form: several bodies, views of what they were packed with."""

import pytest
import torch

from services.worker.ops.body_planes import PassedBody, naive
from services.worker.ops.body_planes import triton as kernels
from tests.exactness.rig import assert_close, assert_far

# Heads, key channels, value channels, and a transition's rows and columns: dense, a number a channel, one number.
FORMS = [(2, 12, 7, 12, 12), (3, 72, 70, 72, 72), (2, 40, 20, 40, 1), (4, 24, 72, 1, 1)]


def _bodies(form: tuple[int, int, int, int, int], device: torch.device) -> list[PassedBody]:
    heads, keys, values, rows, columns = form
    drawn = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn).to(device)

    transitions, seams, states = (
        draw(3, heads, rows, columns),
        draw(3, heads, keys, values),
        draw(3, heads, keys, values),
    )
    tails, bounds = draw(3, 3, 37).bfloat16(), -0.01 * draw(200, heads).abs()
    runs = (slice(3, 4), slice(4, 71), slice(71, 200))
    return [
        PassedBody(transitions[index], seams[index], states[index], tails[index], bounds[run])
        for index, run in enumerate(runs)
    ]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_keep(form: tuple[int, int, int, int, int], device: torch.device) -> None:
    bodies = _bodies(form, device)
    actual, expected = kernels.keep(bodies), naive.keep(bodies)
    for own, known, body in zip(actual, expected, bodies, strict=True):
        assert torch.equal(own.transition, body.transition)
        assert torch.equal(own.tail, body.tail)
        assert_close(own.end_state, known.end_state, 1e-5)
        assert_close(own.decay, known.decay, 1e-6)
        assert_far(body.state, own.end_state, 1e-5)
    assert_far(actual[0].decay, expected[1].decay, 1e-6)


def test_nothing_of_the_pack_lives_on(device: torch.device) -> None:
    """Planes are memory of their own, as large as they are themselves."""
    bodies = _bodies(FORMS[0], device)
    for form in (kernels, naive):
        for planes in form.keep(bodies):
            for kept in (planes.transition, planes.end_state, planes.tail, planes.decay):
                assert kept.untyped_storage().nbytes() == kept.nbytes


def test_no_bodies() -> None:
    assert kernels.keep([]) == naive.keep([]) == []
