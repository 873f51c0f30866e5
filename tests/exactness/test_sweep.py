"""Prompts that share a sweep over the layers answer as each does alone, and leave the same states behind."""

import pytest
import torch

from services.worker.engine.combine import CombinePart, CombinePass, CombinePlan
from services.worker.engine.context import CaptureProfile
from services.worker.engine.seam import SeamWindow
from services.worker.engine.states import PrefixState
from tests.exactness.conftest import RigFactory
from tests.exactness.rig import Combined, PassRig, assert_close, assert_far, draw_ids

PROFILE = CaptureProfile(SeamWindow(4), draw_ids(5, 1))
FORCED = draw_ids(6, 9)


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
