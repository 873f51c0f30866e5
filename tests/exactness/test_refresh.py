"""Refreshed blocks of every family: where the state at their head is known, their keys are those of a full recompute."""

import math

import torch

from services.worker.engine.combine import CombinePass, CombineRows
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import CaptureProfile
from services.worker.engine.reach import renewal_scores
from services.worker.engine.refresh import Side
from services.worker.engine.refreshed_rows import AttendingRows, RefreshedRows
from services.worker.engine.seam import SeamWindow
from services.worker.engine.sweep import Sweep
from services.worker.mixers.linear import LinearMixer
from tests.exactness.conftest import RigFactory
from tests.exactness.rig import PassRig, assert_close, assert_far, draw_ids, finish
from tests.models import Variant

PRIME, SYSTEM, SEGMENT, QUESTION = draw_ids(5, 1), draw_ids(7, 2), draw_ids(75, 3), draw_ids(9, 6)
WINDOW = 4


@torch.inference_mode()
def keys_of(rig: PassRig, part: CombinePart, places: range) -> torch.Tensor:
    """Fresh keys of the last attention layer at places of the segment."""
    plan = CombinePlan(None, (CombinePart(SYSTEM), part, CombinePart(QUESTION)), 4)
    one = CombinePass(rig.context, plan)
    rows = RefreshedRows(rig.context, one) if part.sides else CombineRows(rig.context, [one])
    finish(Sweep(rig.context, [rows]).run())
    assert bool(rows.finish().isfinite().all())
    slots = dict(zip(one.layout.positions, one.layout.write_slots, strict=True))
    pool = rig.context.memory.page_pools[-1].keys.flatten(0, 1)
    found = pool[[slots[len(SYSTEM) + place] for place in places]].clone()
    one.release()
    return found


def test_a_block_at_the_bodys_head_is_exact(make_rig: RigFactory, variant: Variant) -> None:
    """Also where blocks follow it. A block in the middle, without replay, is not."""
    rig = make_rig(CaptureProfile(SeamWindow(WINDOW), PRIME))
    (state,) = rig.capture(SEGMENT)
    head, later = range(WINDOW, WINDOW + 30), range(WINDOW + 24, WINDOW + 30)
    expected = keys_of(rig, CombinePart(SEGMENT), head)
    first = Side(head.start, head.start, head.stop)
    assert_close(keys_of(rig, CombinePart(SEGMENT, state, sides=(first,)), head), expected)
    two = (first, Side(head.stop + 9, head.stop + 11, len(SEGMENT)))
    assert_close(keys_of(rig, CombinePart(SEGMENT, state, sides=two), head), expected)
    kinds = [isinstance(layer.mixer, LinearMixer) for layer in rig.context.model.layers]
    if kinds.count(False) == 1:
        # What is replayed attends to stored keys, and is exact up to the first attention layer.
        replayed = Side(head.start, later.start, later.stop)
        assert_close(keys_of(rig, CombinePart(SEGMENT, state, sides=(replayed,)), later), expected[-len(later) :])
    ahead_of_last = kinds[: len(kinds) - 1 - kinds[::-1].index(False)]
    if any(ahead_of_last) or len(ahead_of_last) > 1:
        # Of attention layers, the second one's keys hang on the first one's, which never change.
        bare = Side(later.start, later.start, later.stop)
        assert_far(keys_of(rig, CombinePart(SEGMENT, state, sides=(bare,)), later), expected[-len(later) :])


@torch.inference_mode()
def test_what_is_wanted_is_attended_to_and_reached(make_rig: RigFactory, variant: Variant) -> None:
    """Every full-attention layer gives each of the question's tokens a mass of one; bodies keep what their head reaches."""
    rig = make_rig(CaptureProfile(SeamWindow(WINDOW), PRIME))
    (state,) = rig.capture(SEGMENT)
    parts = (CombinePart(SYSTEM), CombinePart(SEGMENT, state), CombinePart(QUESTION))
    one = CombinePass(rig.context, CombinePlan(None, parts, 4))
    attending = AttendingRows(rig.context, one, len(QUESTION))
    finish(Sweep(rig.context, [attending]).run())
    layers = sum(not isinstance(layer.mixer, LinearMixer) for layer in rig.context.model.layers)
    assert_close(attending.attention.sum(), torch.tensor(float(layers * len(QUESTION))))
    scores = renewal_scores(one.plan, attending.attention)
    first, behind = len(SYSTEM) + WINDOW, len(SYSTEM) + len(SEGMENT)
    assert torch.equal(scores[:first], attending.attention[:first])
    assert torch.equal(scores[behind:], attending.attention[behind:])
    decays = [float(own) for plane in state.planes for own in plane.decay]
    for place in range(first, behind):
        left = [decay ** ((place - first) / (behind - first)) for decay in decays] or [1.0]
        expected = float(attending.attention[place]) * sum(left) / len(left)
        assert math.isclose(float(scores[place]), expected, rel_tol=1e-4, abs_tol=1e-9)
    assert (scores[behind - 1] < attending.attention[behind - 1]) == bool(decays)
    one.release()


def test_stored_rows_are_cut_anywhere(make_rig: RigFactory, variant: Variant) -> None:
    """The rows of some places show just these slots, at these positions."""
    rig = make_rig(CaptureProfile(SeamWindow(WINDOW), PRIME))
    (state,) = rig.capture(SEGMENT)
    size = rig.context.pages.page_size
    whole = list(state.rows(100).rows(size))
    slots = [slot for row in whole for slot in row.slots(size)]
    for start in range(WINDOW, len(SEGMENT), 5):
        for stop in range(start, len(SEGMENT) + 1, 7):
            rows = [own for row in state.rows_of(100, range(start, stop), size) for own in row.rows(size)]
            assert [slot for row in rows for slot in row.slots(size)] == slots[start - WINDOW : stop - WINDOW]
            places = [row.first + index for row in rows for index in range(row.count)]
            assert places == list(range(100 + start, 100 + stop))
            assert {row.base for row in rows} <= {100}
