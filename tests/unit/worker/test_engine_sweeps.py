"""Requests that share a sweep over the layers: who is taken, what each hears, and what cancellation and failure leave."""

import gc
import weakref
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine.capture import CapturePass
from services.worker.engine.combine_queue import count_joined
from services.worker.engine.limits import EngineLimits
from services.worker.engine.requests import CaptureEvent, CaptureSegment, FailedEvent, PromptPart, SnapshotOrder
from services.worker.engine.states import SegmentState
from tests.exactness.rig import draw_ids
from tests.unit.worker.conftest import EngineFactory
from tests.unit.worker.engine_rig import EngineRig, Heard, live, segment

SLOW = EngineLimits(1024, layer_tokens=1)
ONE_BY_ONE = EngineLimits(1024, layer_tokens=1, sweep_tokens=1)
IDS = draw_ids(60, 1)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 120))
def test_a_sweep_takes_from_the_head_what_fits(live_tokens: list[int], limit: int) -> None:
    fitting = [count for count, total in enumerate(accumulate(live_tokens), 1) if total <= limit]
    assert count_joined(live_tokens, limit) == max(fitting, default=1)


def test_a_dropped_state_goes_with_the_last_prompt_that_used_it(make_engine: EngineFactory) -> None:
    """An idle engine holds nothing of a document whose state has been dropped."""
    rig = make_engine()
    rig.capture(CaptureSegment(b"one", IDS))
    state = rig.context.store.get(b"one")
    assert isinstance(state, SegmentState)
    planes = [weakref.ref(plane.end_state) for plane in state.planes]
    del state
    heard = rig.submit("r", segment(b"one", IDS), live(5, 2))
    rig.run()
    assert heard.is_complete
    assert rig.context.store.drop(b"one")
    gc.collect()
    assert not any(plane() is not None for plane in planes)


def _prefill_steps(rig: EngineRig, heard: list[Heard]) -> list[int]:
    """The step in which each request had its first token."""
    steps = [0] * len(heard)
    for step in range(1, 200):
        rig.step()
        steps = [found or (step if one.tokens else 0) for found, one in zip(steps, heard, strict=True)]
        if all(steps):
            return steps
    raise AssertionError("a request has no first token")


def test_waiting_requests_share_a_sweep(make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    steps = _prefill_steps(rig, [rig.submit(f"r{seed}", live(10 * seed + 1, seed)) for seed in range(3)])
    assert len(set(steps)) == 1


def test_a_limit_of_one_token_combines_one_by_one(make_engine: EngineFactory) -> None:
    rig = make_engine(ONE_BY_ONE)
    steps = _prefill_steps(rig, [rig.submit(f"r{seed}", live(10, seed)) for seed in range(3)])
    assert steps == sorted(set(steps))


def test_a_sweep_is_first_come_first_served(make_engine: EngineFactory) -> None:
    """The third would fit beside the first, but not ahead of the second; what comes later waits for the next sweep."""
    rig = make_engine(EngineLimits(1024, layer_tokens=1, sweep_tokens=40))
    heard = [rig.submit(name, live(length, length)) for name, length in (("a", 30), ("b", 20), ("c", 10))]
    rig.step()
    heard.append(rig.submit("d", live(5, 5)))
    first, *rest = _prefill_steps(rig, heard)
    assert first < rest[0]
    assert len(set(rest)) == 1


def _tokens_alone(make_engine: EngineFactory, count: int) -> list[list[int]]:
    rig = make_engine(ONE_BY_ONE)
    rig.capture(CaptureSegment(b"one", IDS))
    heard = [_submit(rig, index) for index in range(count)]
    rig.run()
    return [one.tokens for one in heard]


def _submit(rig: EngineRig, index: int) -> Heard:
    """A hit, own tokens, and a snapshot behind them."""
    parts = (segment(b"one", IDS), live(10 + 7 * index, index), live(3, 50 + index))
    return rig.submit(f"r{index}", *parts, max_tokens=12, snapshots=(SnapshotOrder(bytes([index]), 2),))


def test_joined_requests_hear_what_each_would_alone(make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    rig.capture(CaptureSegment(b"one", IDS))
    heard = [_submit(rig, index) for index in range(3)]
    rig.run()
    assert [one.tokens for one in heard] == _tokens_alone(make_engine, 3)
    for index, one in enumerate(heard):
        assert [snapshot.key for snapshot in one.prefilled.snapshots] == [bytes([index])]
        assert one.prefilled.combine_seconds > 0.0
    rig.drop_all([b"one", *(bytes([index]) for index in range(3))])
    rig.assert_nothing_held()


@pytest.mark.parametrize("steps", range(1, 7))
def test_one_cancelled_in_a_shared_sweep(steps: int, make_engine: EngineFactory) -> None:
    """Its neighbours go on; its pages stay taken while the sweep still writes into them, and no snapshot of it is stored."""
    rig = make_engine(SLOW)
    rig.capture(CaptureSegment(b"one", IDS))
    heard = [_submit(rig, index) for index in range(3)]
    for _ in range(steps):
        rig.step()
    free, combining = rig.context.pages.num_free, not heard[0].events
    rig.engine.cancel("r1")
    told = len(heard[1].events)
    if combining:
        assert rig.context.pages.num_free == free
        assert rig.engine.num_running == 3
    rig.run()
    expected = _tokens_alone(make_engine, 3)
    assert [heard[0].tokens, heard[2].tokens] == [expected[0], expected[2]]
    assert len(heard[1].events) == told
    assert (bytes([1]) in rig.context.store) != combining
    rig.drop_all([b"one", *(bytes([index]) for index in range(3))])
    rig.assert_nothing_held()


def test_a_sweep_that_nobody_wants_is_dropped_at_once(make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    heard = [rig.submit(name, live(20, 1)) for name in "ab"]
    rig.step()
    for name in "ab":
        rig.engine.cancel(name)
    rig.assert_nothing_held()
    assert rig.engine.is_idle
    assert [one.events for one in heard] == [[], []]


def test_a_bad_prompt_fails_alone(make_engine: EngineFactory) -> None:
    """A token that the model does not have: its neighbours run again, each alone, and what came later goes on as ever."""
    rig = make_engine(SLOW)
    rig.capture(CaptureSegment(b"one", IDS))
    heard = [_submit(rig, index) for index in range(2)]
    bad = rig.submit("bad", live(9, 1), PromptPart((1 << 20,)))
    rig.step()
    heard.append(_submit(rig, 2))
    rig.run()
    (event,) = bad.events
    assert isinstance(event, FailedEvent)
    assert "combine failed" in str(event.error)
    assert [one.tokens for one in heard] == _tokens_alone(make_engine, 3)
    rig.drop_all([b"one", *(bytes([index]) for index in range(3))])
    rig.assert_nothing_held()


def test_one_cancelled_before_its_retry_is_freed_at_once(make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    bad, other = rig.submit("bad", PromptPart((1 << 20,))), rig.submit("other", live(20, 1))
    rig.step()
    rig.engine.cancel("other")
    rig.run()
    assert isinstance(bad.events[-1], FailedEvent)
    assert other.events == []
    rig.assert_nothing_held()


@pytest.mark.parametrize(("lengths", "chunks"), [((32,), 1), ((33,), 2), ((32, 20, 31), 1), ((40, 70, 9), 3)])
@torch.inference_mode()
def test_a_capture_sweeps_the_layers_once_a_chunk(lengths: tuple[int, ...], chunks: int, rig: EngineRig) -> None:
    """However many segments are packed."""
    capture = CapturePass(rig.context, [draw_ids(length, length) for length in lengths], None)
    assert sum(1 for _ in capture.run()) == chunks * len(rig.context.model.layers)


def _end_steps(rig: EngineRig, heard: Heard, events: list[CaptureEvent]) -> tuple[int, int]:
    """The steps in which a request had its first token and a capture its last event."""
    prefilled = captured = 0
    for step in range(1, 200):
        rig.step()
        prefilled = prefilled or (step if heard.events else 0)
        captured = captured or (step if events else 0)
        if prefilled and captured:
            return prefilled, captured
    raise AssertionError("something did not end")


ROOMY = EngineLimits(1024, layer_tokens=1, sweep_tokens=100)


@pytest.mark.parametrize(
    ("sweep_tokens", "background", "is_joined"), [(50, False, True), (49, False, False), (50, True, False)]
)
def test_a_capture_fills_the_room_that_prompts_leave(
    sweep_tokens: int, background: bool, is_joined: bool, make_engine: EngineFactory
) -> None:
    """20 live tokens and a segment of 30; what does not fit, or is to come last, runs behind."""
    rig = make_engine(EngineLimits(1024, layer_tokens=1, sweep_tokens=sweep_tokens))
    heard = rig.submit("r", live(20, 1), max_tokens=9)
    events = rig.submit_capture("c", CaptureSegment(b"a", draw_ids(30, 2)), background=background)
    prefilled, captured = _end_steps(rig, heard, events)
    assert (prefilled == captured) == is_joined
    assert prefilled <= captured


def test_a_prompt_waits_for_no_capture(make_engine: EngineFactory) -> None:
    """It runs between two layers of the capture."""
    rig = make_engine(ROOMY)
    events = rig.submit_capture("c", CaptureSegment(b"a", draw_ids(70, 2)))
    rig.step()
    first = rig.submit("r", live(9, 1))
    assert _prefill_steps(rig, [first])[0] <= len(rig.context.model.layers) + 2
    assert events == []
    rig.run()
    assert [event.reason for event in events] == [""]


@pytest.mark.parametrize("steps", range(1, 5))
@pytest.mark.parametrize("cancelled", ["r", "c"])
def test_one_kind_cancelled_beside_the_other(cancelled: str, steps: int, make_engine: EngineFactory) -> None:
    """The sweep goes on without its rows, and what they held is free at once."""
    rig = make_engine(ROOMY)
    free = rig.context.pages.num_free
    heard, events = rig.submit("r", live(20, 1)), rig.submit_capture("c", CaptureSegment(b"a", draw_ids(30, 2)))
    for _ in range(steps):
        rig.step()
    assert not events
    rig.engine.cancel(cancelled)
    assert rig.context.pages.num_free == free - (2 if cancelled == "c" else 3)
    rig.run()
    assert (heard.is_complete, bool(events)) == ((cancelled != "r"), cancelled != "c")
    rig.drop_all([b"a"])
    rig.assert_nothing_held()


@pytest.mark.parametrize("is_bad_prompt", [True, False])
def test_a_fault_of_one_kind_leaves_the_other(is_bad_prompt: bool, make_engine: EngineFactory) -> None:
    """Everything of a sweep that failed runs again, each on its own; a pack's good segment is stored too."""
    rig = make_engine(ROOMY)
    bad = (1 << 20,) * 20
    heard = rig.submit("r", PromptPart(bad) if is_bad_prompt else live(20, 1))
    segments = (CaptureSegment(b"a", draw_ids(30, 2)), CaptureSegment(b"b", draw_ids(30, 3) if is_bad_prompt else bad))
    events = rig.submit_capture("c", *segments)
    rig.run()
    reasons = {event.key: event.reason for event in events}
    assert len(events) == 2
    assert reasons[b"a"] == ""
    assert (reasons[b"b"] == "") == is_bad_prompt
    assert heard.is_complete != is_bad_prompt
    rig.drop_all([b"a", b"b"])
    rig.assert_nothing_held()
