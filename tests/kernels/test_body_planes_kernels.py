"""What is kept of captured bodies, the kernel against the naive form: several bodies, views of what they were packed with."""

import pytest
import torch

from services.worker.ops.body_planes import BodyPlanes, PackedBodies, PassedBody, naive
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


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_keep_packed(form: tuple[int, int, int, int, int], device: torch.device) -> None:
    """Packed bodies into memory that is there; room that no body has is left alone."""
    bodies = _bodies(form, device)
    expected = naive.keep(bodies)
    own = [BodyPlanes(*(torch.zeros_like(tensor) for tensor in _tensors(planes))) for planes in expected]
    stacks = [torch.stack(tensors) for tensors in zip(*((*_given(body),) for body in bodies), strict=True)]
    transitions, seams, states, tails = (
        torch.cat([stack, torch.full_like(stack[:1], float("nan"))]) for stack in stacks
    )
    bounds = torch.cat([torch.full((3, form[0]), 9.0, device=device), *(body.log_bounds for body in bodies)])
    counts = [len(body.log_bounds) for body in bodies]
    places = [[tensor.data_ptr() for tensor in _tensors(planes)] for planes in own] + [[0] * 4]
    kernels.keep_packed(
        PackedBodies(
            transitions,
            seams,
            states,
            tails,
            bounds,
            torch.tensor([3, 3 + counts[0], 3 + counts[0] + counts[1], 0], device=device),
            torch.tensor([*counts, 0], device=device),
        ),
        torch.tensor(places, device=device),
        is_aligned=all(place % 16 == 0 for row in places for place in row),
    )
    for planes, known in zip(own, expected, strict=True):
        for tensor, true in zip(_tensors(planes), _tensors(known), strict=True):
            assert_close(tensor, true, 1e-5)
    assert_far(own[0].decay, expected[1].decay, 1e-5)


def _given(body: PassedBody) -> tuple[torch.Tensor, ...]:
    return body.transition, body.seam_state, body.state, body.tail


def _tensors(planes: BodyPlanes) -> tuple[torch.Tensor, ...]:
    return planes.transition, planes.end_state, planes.tail, planes.decay
