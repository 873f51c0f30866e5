"""Recorded sweeps against the same passes run as they are: when they are recorded, replayed, and with room to spare."""

from unittest.mock import Mock

import pytest
import torch

from services.worker.engine.capture import CapturePass
from services.worker.engine.capture_rows import CaptureRows
from services.worker.engine.combine import CombinePass, CombineRows
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import CaptureProfile
from services.worker.engine.kernel_passes import captures_whole
from services.worker.engine.seam import SeamWindow
from services.worker.engine.sweep import Sweep
from services.worker.engine.sweep_graphs import SweepGraphs, choose_sweep_graphs, room_of
from tests.exactness.rig import PassRig, assert_close, assert_far, create_context, draw_ids, finish
from tests.models import CheckpointFactory, Variant

TOLERANCE = 1e-5


@pytest.fixture
def rig(checkpoints: CheckpointFactory, variant: Variant, device: torch.device) -> PassRig:
    if device.type != "cuda":
        pytest.skip("passes are recorded on a CUDA device; HYPIC_DEVICE names none")
    profile = CaptureProfile(SeamWindow(4), draw_ids(3, 9))
    return PassRig(create_context(checkpoints.directory(variant), device, profile))


@pytest.fixture
def graphs(rig: PassRig) -> SweepGraphs:
    chosen = choose_sweep_graphs(rig.context)
    if chosen is None:
        pytest.skip("this family has no linear layers, or heads that no kernel takes: it runs as it is")
    return chosen


def _plan(rig: PassRig, seed: int, question: int) -> CombinePlan:
    """Live tokens that are kept, two bodies, a question."""
    first, second = rig.capture(draw_ids(40 + seed, seed), draw_ids(23, seed + 1))
    parts = (
        CombinePart(draw_ids(5 + seed, seed + 2), keep=True),
        CombinePart(first.token_ids, first),
        CombinePart(second.token_ids, second),
        CombinePart(draw_ids(question, seed + 3)),
    )
    return CombinePlan(None, parts, max_tokens=4)


class _Outcome:
    """Logits, states and snapshots of prompts that ran together."""

    def __init__(self, rig: PassRig, plans: list[CombinePlan], graphs: SweepGraphs | None) -> None:
        context = rig.context
        with torch.inference_mode():
            passes = [CombinePass(context, plan) for plan in plans]
            rows = CombineRows(context, passes)
            finish(Sweep(context, [rows]).run() if graphs is None else graphs.run([rows]))
            self.logits = rows.finish().clone()
            slots = [one.prompt.slot for one in passes]
            linear = context.memory.linear_slots
            self.states = torch.stack([layer.states[slots] for layer in linear])
            self.tails = torch.stack([layer.tails[slots] for layer in linear])
            self.kept = torch.stack([one.snapshots[0].snapshots[-1].state for one in passes])
            for one in passes:
                one.release()


def test_recorded_passes_are_the_passes(rig: PassRig, graphs: SweepGraphs) -> None:
    plans = [_plan(rig, seed, question) for seed, question in ((1, 7), (2, 30), (3, 1))]
    batches = [
        [plans[0]],
        [plans[1]],
        [plans[0]],
        [plans[2], plans[1]],
        [plans[1], plans[2]],
        [plans[2]],
        [plans[2], plans[1]],
    ]
    for number, batch in enumerate(batches):
        expected, actual = _Outcome(rig, batch, None), _Outcome(rig, batch, graphs)
        for name in ("logits", "states", "tails", "kept"):
            true = getattr(expected, name)
            # Without a convolution there are no tails.
            if true.numel():
                assert_close(getattr(actual, name), true, TOLERANCE, f"{name} of pass {number}")
    assert_far(_Outcome(rig, batches[4], graphs).logits, _Outcome(rig, batches[3], None).logits, TOLERANCE)


def test_a_longer_context_is_recorded_anew(rig: PassRig, graphs: SweepGraphs) -> None:
    """One room, but page tables that outgrow what was recorded."""
    short = _plan(rig, 1, 7)
    states = rig.capture(*(draw_ids(130, 50 + index) for index in range(6)))
    long = CombinePlan(
        None,
        (
            CombinePart(draw_ids(5, 3), keep=True),
            *(CombinePart(state.token_ids, state) for state in states),
            CombinePart(draw_ids(7, 4)),
        ),
        max_tokens=4,
    )
    for plan in (short, short, long, short, long):
        assert_close(_Outcome(rig, [plan], graphs).logits, _Outcome(rig, [plan], None).logits, TOLERANCE)


def test_what_cannot_be_recorded_runs_as_it_is(
    rig: PassRig, graphs: SweepGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise RuntimeError("this device records nothing")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    plan = _plan(rig, 1, 7)
    expected = _Outcome(rig, [plan], None).logits
    for _ in range(3):
        assert_close(_Outcome(rig, [plan], graphs).logits, expected, TOLERANCE)


def test_rooms_are_few(rig: PassRig, graphs: SweepGraphs) -> None:
    del graphs
    rooms = set()
    for question in range(1, 40, 6):
        one = CombinePass(rig.context, _plan(rig, 1, question))
        rows = CombineRows(rig.context, [one])
        rooms.add(room_of((rows,), of_channels=False))
        one.release()
    assert len(rooms) == 1


def _rows(rig: PassRig, segments: list[tuple[int, ...]]) -> tuple[CapturePass, CaptureRows]:
    one = CapturePass(rig.context, segments, rig.prime)
    (rows,) = one.take_chunk()
    return one, rows


@torch.inference_mode()
def _cold(
    rig: PassRig, segments: list[tuple[int, ...]], question: int | None, graphs: SweepGraphs | None
) -> list[torch.Tensor]:
    """Captures, and a prompt that composes them where there is a question: logits, and all that is kept."""
    one, captured = _rows(rig, segments)
    rows: list[CaptureRows | CombineRows] = [captured]
    prompt = None
    if question is not None:
        parts = [CombinePart(state.token_ids, state) for state in one.states]
        plan = CombinePlan(
            None, (CombinePart(draw_ids(5, 4)), *parts, CombinePart(draw_ids(question, 5))), max_tokens=4
        )
        prompt = CombinePass(rig.context, plan)
        rows.append(CombineRows(rig.context, [prompt]))
    finish(Sweep(rig.context, rows).run() if graphs is None else graphs.run(rows))
    kept = [rows[-1].finish().clone()] if isinstance(rows[-1], CombineRows) else []
    states = one.finish()
    kept += [tensor for state in states for tensor in rig.fingerprint(state)]
    for state in states:
        rig.context.pages.release(state.pages)
    if prompt is not None:
        prompt.release()
    return kept


@pytest.mark.parametrize("question", [None, 6])
def test_recorded_captures_are_the_captures(
    question: int | None, rig: PassRig, graphs: SweepGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = [draw_ids(count, count) for count in (70, 30, 19, 25, 22)]
    batches = [[draw_ids(41, 1)], [draw_ids(150, 2)], several]
    replay = Mock(wraps=graphs._replay)
    monkeypatch.setattr(graphs, "_replay", replay)
    for number, index in enumerate((0, 0, 1, 0, 2, 2, 2, 1)):
        expected, actual = (_cold(rig, batches[index], question, form) for form in (None, graphs))
        for own, true in zip(actual, expected, strict=True):
            assert_close(own, true, TOLERANCE, f"pass {number}")
    # Families that turn end states, or erase nothing, are captured by sweeps.
    assert replay.call_count == (4 if captures_whole(rig.context) else 0)
    assert_far(_cold(rig, batches[0], question, graphs)[0], _cold(rig, batches[1], question, None)[0], TOLERANCE)
