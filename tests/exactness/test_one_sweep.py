"""Cold segments captured in the sweep that combines them: the same answers and bytes as capture, then combine."""

from collections.abc import Sequence

import pytest
import torch

from services.worker.engine.capture import CapturePass
from services.worker.engine.combine import CombinePass, CombineRows
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import CaptureProfile
from services.worker.engine.limits import EngineLimits
from services.worker.engine.loop import Engine
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    GenerateEvent,
    GenerateRequest,
    PrefilledEvent,
    PromptPart,
    Serving,
    TokenEvent,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.engine.seam import SeamWindow
from services.worker.engine.states import SegmentState
from services.worker.engine.sweep import Rows, run_layer
from services.worker.engine.transfer import OutgoingState
from tests.exactness.conftest import RigFactory
from tests.exactness.rig import TOLERANCE, Combined, PassRig, assert_close, draw_ids, relative_error

PROFILE = CaptureProfile(SeamWindow(4), draw_ids(5, 1), chunk_tokens=64)
# Two chunks, one, and one that is a hit.
COLD = (draw_ids(93, 20), draw_ids(40, 21))
HIT = draw_ids(51, 22)
FORCED = draw_ids(6, 9)


@pytest.fixture
def rig(make_rig: RigFactory) -> PassRig:
    return make_rig(PROFILE)


def _plan(states: Sequence[SegmentState], hit: SegmentState) -> CombinePlan:
    """Cold parts around a hit, one of them twice; a snapshot behind a cold one."""
    one, two = (CombinePart(state.token_ids, state) for state in states)
    kept = CombinePart(one.token_ids, one.state, keep=True)
    parts = (CombinePart(draw_ids(9, 6)), kept, CombinePart(HIT, hit), two, one, CombinePart(draw_ids(5, 7)))
    return CombinePlan(None, parts, 32)


def _assert_same(rig: PassRig, own: torch.Tensor, expected: torch.Tensor) -> None:
    """To the last bit on the CPU, where every pass makes products of its own."""
    assert_close(own, expected)
    assert rig.context.device.type != "cpu" or torch.equal(own, expected)


@torch.inference_mode()
def _run_joined(rig: PassRig, hit: SegmentState, *, captures_last: bool = False) -> tuple[Combined, list[SegmentState]]:
    """Chunks but the last run ahead; the last one stands beside the prompt in every layer, behind it for a control."""
    capture = CapturePass(rig.context, COLD, rig.prime)
    combine = CombinePass(rig.context, _plan(capture.states, hit))
    rows = CombineRows(rig.context, [combine])
    while capture.chunks_left > 1:
        _run_layers(rig, capture.take_chunk())
    joined: list[Rows] = [*capture.take_chunk(), rows]
    _run_layers(rig, joined[::-1] if captures_last else joined)
    logits = rows.finish()[0]
    return Combined(logits, combine.prompt, combine.snapshots), capture.finish()


def _run_layers(rig: PassRig, joined: Sequence[Rows]) -> None:
    for rows in joined:
        rows.start()
    for layer in rig.context.model.layers:
        for rows in joined:
            run_layer(layer, [rows])


def _stored_planes(rig: PassRig, state: SegmentState) -> list[dict[str, torch.Tensor]]:
    outgoing = OutgoingState(rig.context, state)
    planes = [outgoing.read_layer(layer) for layer in range(len(outgoing.layers))]
    outgoing.close()
    return planes


def test_one_sweep_is_capture_then_combine(rig: PassRig) -> None:
    (hit,) = rig.capture(HIT)
    combined, states = _run_joined(rig, hit)
    expected = rig.capture(*COLD)
    for state in expected:
        rig.assert_remembers(state)
    plan = _plan(expected, hit)
    alone = rig.combine(*plan.parts)
    for own, other in zip(states, expected, strict=True):
        for planes, others in zip(_stored_planes(rig, own), _stored_planes(rig, other), strict=True):
            assert {name: plane.shape for name, plane in planes.items()} == {
                name: plane.shape for name, plane in others.items()
            }
            assert rig.context.device.type != "cpu" or all(torch.equal(planes[name], others[name]) for name in planes)
        for tensor, same_tensor in zip(rig.fingerprint(own), rig.fingerprint(other), strict=True):
            _assert_same(rig, tensor, same_tensor)
    _assert_same(rig, combined.logits, alone.logits)
    for own_layer, layer in zip(combined.snapshots[1].snapshots, alone.snapshots[1].snapshots, strict=True):
        _assert_same(rig, own_layer.state, layer.state)
    _assert_same(rig, rig.decode(combined, FORCED), rig.decode(alone, FORCED))


def test_a_prompt_ahead_of_its_captures_is_seen(rig: PassRig) -> None:
    """Control: with linear layers there is nothing to compose yet; without any, pages are read before they are written."""
    (hit,) = rig.capture(HIT)
    expected = rig.logits(*_plan(rig.capture(*COLD), hit).parts)
    if rig.context.model.linear_mixers:
        with pytest.raises(IndexError):
            _run_joined(rig, hit, captures_last=True)
        return
    poisoned, _ = _run_joined(rig, hit, captures_last=True)
    assert not relative_error(poisoned.logits, expected) <= 10 * TOLERANCE


def test_products_of_both_at_once_are_close(rig: PassRig) -> None:
    """As a GPU runs them: rows of captures and of the prompt in every product."""
    (hit,) = rig.capture(HIT)
    expected = rig.logits(*_plan(rig.capture(*COLD), hit).parts)
    with torch.inference_mode():
        capture = CapturePass(rig.context, COLD, rig.prime)
        combine = CombinePass(rig.context, _plan(capture.states, hit))
        rows = CombineRows(rig.context, [combine])
        _run_layers(rig, capture.take_chunk())
        joined: list[Rows] = [*capture.take_chunk(), rows]
        for one in joined:
            one.start()
        for layer in rig.context.model.layers:
            run_layer(layer, joined)
        assert_close(rows.finish()[0], expected)


def _answer(engine: Engine, name: str, *, captures: bool) -> list[GenerateEvent]:
    heard: list[GenerateEvent] = []
    one, two = (PromptPart(ids, Serving.SEGMENT, ids_key(ids), captures) for ids in COLD)
    parts = (PromptPart(draw_ids(9, 6)), one, two, one, PromptPart(draw_ids(5, 7)))
    engine.submit(GenerateRequest(name, parts, SamplingOptions(8), heard.append))
    while not engine.is_idle:
        engine.step()
    engine.check_integrity()
    return heard


def ids_key(ids: tuple[int, ...]) -> bytes:
    return bytes([len(ids)])


def _tokens(events: Sequence[GenerateEvent]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


@pytest.mark.parametrize("capture_tokens", [1024, 50])
def test_an_engine_answers_and_stores_as_in_two_steps(make_rig: RigFactory, capture_tokens: int) -> None:
    """One pack, or one a segment; then cold and warm answers are alike."""
    limits = EngineLimits(1024, capture_tokens=capture_tokens)
    rig = make_rig(PROFILE)
    engine = rig.start_engine(limits)
    cold = _answer(engine, "cold", captures=True)
    captured = [event for event in cold if isinstance(event, CaptureEvent)]
    assert {event.key for event in captured} == {ids_key(ids) for ids in COLD}
    assert [event.reason for event in captured] == ["", ""]
    (prefilled,) = [event for event in cold if isinstance(event, PrefilledEvent)]
    assert [part.captured_tokens for part in prefilled.parts] == [0, 89, 36, 0, 0]
    assert [part.reused_tokens for part in prefilled.parts] == [0, 0, 0, 89, 0]
    first = {ids: rig.fingerprint(_stored(rig, ids)) for ids in COLD}
    assert _tokens(_answer(engine, "warm", captures=False)) == _tokens(cold)

    for ids in COLD:
        rig.context.store.drop(ids_key(ids))
    events: list[CaptureEvent] = []
    segments = tuple(CaptureSegment(ids_key(ids), ids) for ids in COLD)
    engine.submit_capture(CaptureJob("c", segments, events.append))
    while not engine.is_idle:
        engine.step()
    assert [event.reason for event in events] == ["", ""]
    assert _tokens(_answer(engine, "two steps", captures=False)) == _tokens(cold)
    for ids in COLD:
        for own, expected in zip(rig.fingerprint(_stored(rig, ids)), first[ids], strict=True):
            _assert_same(rig, own, expected)


def _stored(rig: PassRig, ids: tuple[int, ...]) -> SegmentState:
    state = rig.context.store.get_segment(ids_key(ids), ids)
    assert state is not None
    return state
