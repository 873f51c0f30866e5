"""Prompts and captures that share a sweep over the layers answer as each does alone, and leave the same states behind."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from services.worker.engine.capture import CapturePass
from services.worker.engine.combine import CombinePass, CombineRows
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import CaptureProfile
from services.worker.engine.limits import EngineLimits
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    GenerateEvent,
    GenerateRequest,
    PrefilledEvent,
    PromptPart,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.engine.seam import SeamWindow
from services.worker.engine.states import PrefixState, SegmentState
from services.worker.engine.sweep import Rows, run_layer
from tests.exactness.conftest import RigFactory
from tests.exactness.rig import (
    TOLERANCE,
    Combined,
    PassRig,
    assert_close,
    assert_far,
    draw_ids,
    finish,
    relative_error,
)

PROFILE = CaptureProfile(SeamWindow(4), draw_ids(5, 1), chunk_tokens=64)
FORCED = draw_ids(6, 9)
SEGMENTS = (draw_ids(93, 20), draw_ids(40, 21))


@pytest.fixture
def rig(make_rig: RigFactory) -> PassRig:
    return make_rig(PROFILE)


def _create_prefix(rig: PassRig) -> PrefixState:
    """The state behind 70 tokens."""
    combined = rig.combine(CombinePart(draw_ids(70, 2), keep=True), CombinePart(draw_ids(1, 3)))
    combined.prompt.release(rig.context)
    return combined.snapshots[0]


def _create_plans(rig: PassRig) -> list[CombinePlan]:
    """Three lengths: hits in two orders, a prefix, snapshots behind live parts and bodies, runs shorter than a tail."""
    ids = (draw_ids(40, 4), draw_ids(93, 5))
    one, two = (CombinePart(own, state) for own, state in zip(ids, rig.capture(*ids), strict=True))
    kept = CombinePart(two.token_ids, two.state, keep=True)
    return [
        CombinePlan(None, (CombinePart(draw_ids(9, 6)), one, two, CombinePart(draw_ids(5, 7))), 32),
        CombinePlan(_create_prefix(rig), (kept, CombinePart(draw_ids(2, 8), keep=True), CombinePart((3,))), 32),
        CombinePlan(None, (CombinePart(draw_ids(150, 10), keep=True), kept, one, CombinePart(draw_ids(33, 11))), 32),
    ]


def _assert_same(rig: PassRig, joined: Combined, alone: Combined) -> None:
    assert_close(joined.logits, alone.logits)
    assert joined.snapshots.keys() == alone.snapshots.keys()
    for part, snapshot in alone.snapshots.items():
        assert joined.snapshots[part].token_ids == snapshot.token_ids
        for own, expected in zip(joined.snapshots[part].snapshots, snapshot.snapshots, strict=True):
            assert_close(own.state, expected.state)
            if expected.tail.numel():
                assert_close(own.tail, expected.tail)
    assert_close(rig.decode(joined, FORCED), rig.decode(alone, FORCED))


def test_joined_prompts_answer_as_each_alone(rig: PassRig) -> None:
    plans = _create_plans(rig)
    joined = rig.sweep(*(CombinePass(rig.context, plan) for plan in plans))
    assert [len(combined.snapshots) for combined in joined] == [0, 2, 2]
    for combined, plan in zip(joined, plans, strict=True):
        _assert_same(rig, combined, rig.combine(*plan.parts, prefix=plan.prefix))


def test_snapshots_of_a_sweep_serve_the_next_prompt(rig: PassRig) -> None:
    """And hold no memory of what ran beside them."""
    plans = _create_plans(rig)
    joined = rig.sweep(*(CombinePass(rig.context, plan) for plan in plans))
    for combined, plan in zip(joined[1:], plans[1:], strict=True):
        for part, snapshot in combined.snapshots.items():
            rest = plan.parts[part + 1 :]
            assert_close(rig.logits(*rest, prefix=snapshot), combined.logits)
            for layer in snapshot.snapshots:
                for tensor in (layer.state, layer.tail):
                    assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_sweep_that_failed_can_run_again(rig: PassRig) -> None:
    """What it left in slots and pages is never read."""
    plans = _create_plans(rig)
    passes = [CombinePass(rig.context, plan) for plan in plans]
    with torch.inference_mode():
        half_way = passes[2].run()
        for _ in range(2):
            next(half_way)
        half_way.close()
    for combined, plan in zip(rig.sweep(*passes), plans, strict=True):
        _assert_same(rig, combined, rig.combine(*plan.parts, prefix=plan.prefix))


class _Misplaced(CombinePass):
    """Loads what it starts from into another prompt's slot."""

    slot_of: CombinePass

    def load_slot(self) -> None:
        """See `CombinePass`."""
        own, self.prompt.slot = self.prompt.slot, self.slot_of.prompt.slot
        super().load_slot()
        self.prompt.slot = own


def test_two_prompts_with_swapped_slots_are_seen(rig: PassRig) -> None:
    """Control: each starts from the other's state."""
    if not rig.context.memory.linear_slots:
        pytest.skip("the family has no recurrent state")
    plan = _create_plans(rig)[1]
    other = CombinePlan(None, (CombinePart(draw_ids(12, 12)),), 32)
    expected = rig.logits(*plan.parts, prefix=plan.prefix)
    first, second = _Misplaced(rig.context, plan), _Misplaced(rig.context, other)
    first.slot_of, second.slot_of = second, first
    assert_far(rig.sweep(first, second)[0].logits, expected)


@dataclass(frozen=True, slots=True)
class _Beside:
    """A prompt and a capture that share every matrix product, whatever the device."""

    combine: CombinePass
    rows: CombineRows
    capture: CapturePass

    @torch.inference_mode()
    def run(self, rig: PassRig, *, swapped_layer: int = -1) -> tuple[torch.Tensor, list[SegmentState]]:
        """The prompt shares the capture's first chunk; behind one layer the last rows of both may change places."""
        joined: list[Rows] = [self.rows, *self.capture.take_chunk()]
        for rows in joined:
            rows.start()
        for index, layer in enumerate(rig.context.model.layers):
            run_layer(layer, joined)
            if index == swapped_layer:
                first, second = joined[0].hidden[-1].clone(), joined[1].hidden[-1].clone()
                joined[0].hidden[-1], joined[1].hidden[-1] = second, first
        return self.rows.finish()[0], finish(self.capture.run())


def _start_beside(rig: PassRig, plan: CombinePlan, segments: Sequence[tuple[int, ...]]) -> _Beside:
    combine, capture = CombinePass(rig.context, plan), CapturePass(rig.context, segments, rig.prime)
    return _Beside(combine, CombineRows(rig.context, [combine]), capture)


def test_a_capture_beside_a_prompt_changes_neither(rig: PassRig) -> None:
    """Rows of both in every product; the capture goes on alone behind its first chunk."""
    plan = _create_plans(rig)[1]
    states = rig.capture(*SEGMENTS)
    logits, beside = _start_beside(rig, plan, SEGMENTS).run(rig)
    assert_close(logits, rig.logits(*plan.parts, prefix=plan.prefix))
    for own, expected in zip(beside, states, strict=True):
        for tensor, alone in zip(rig.fingerprint(own), rig.fingerprint(expected), strict=True):
            assert_close(tensor, alone)


def test_rows_that_change_places_are_seen(rig: PassRig) -> None:
    """Control: one row of the prompt goes on as one of the capture, and the other way round."""
    plan = CombinePlan(None, (CombinePart(draw_ids(12, 12)),), 32)
    states = rig.capture(*SEGMENTS)
    logits, swapped = _start_beside(rig, plan, SEGMENTS).run(rig, swapped_layer=0)
    assert_far(logits, rig.logits(*plan.parts))
    errors = [
        relative_error(tensor, alone)
        for own, expected in zip(swapped, states, strict=True)
        for tensor, alone in zip(rig.fingerprint(own), rig.fingerprint(expected), strict=True)
    ]
    assert max(errors) >= 10 * TOLERANCE


def test_an_engine_that_joins_both_leaves_the_same_bytes(make_rig: RigFactory) -> None:
    """On the CPU products stay apart, so that a state's bytes do not know what was swept with it."""
    rig = make_rig(PROFILE)
    expected = rig.fingerprint(rig.capture(SEGMENTS[0])[0])
    engine = rig.start_engine(EngineLimits(1024, sweep_tokens=400))
    told: list[GenerateEvent | CaptureEvent] = []
    for index in range(3):
        parts = (PromptPart(draw_ids(30 + index, index)),)
        engine.submit(GenerateRequest(f"r{index}", parts, SamplingOptions(1), told.append))
    segments = (CaptureSegment(b"a", SEGMENTS[0]), CaptureSegment(b"b", SEGMENTS[1]))
    engine.submit_capture(CaptureJob("c", segments, told.append))
    while not engine.is_idle:
        engine.step()
    assert sum(isinstance(event, PrefilledEvent) for event in told) == 3
    state = rig.context.store.get_segment(b"a", SEGMENTS[0])
    assert state is not None
    for own, alone in zip(rig.fingerprint(state), expected, strict=True):
        assert_close(own, alone, 1e-5)
        assert rig.context.device.type != "cpu" or torch.equal(own, alone)
