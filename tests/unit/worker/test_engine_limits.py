"""What the engine does when there is no room, when work is cancelled, and when states go while they are used."""

import pytest
import torch

from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.limits import EngineLimits
from services.worker.engine.requests import (
    CaptureSegment,
    EngineFullError,
    FailedEvent,
    PrefilledEvent,
    PromptTooLargeError,
    SnapshotOrder,
)
from services.worker.engine.states import SegmentState
from tests.exactness.rig import draw_ids
from tests.unit.worker.conftest import EngineFactory
from tests.unit.worker.engine_rig import EngineRig, live, segment

IDS = draw_ids(60, 1)
SLOW = EngineLimits(1024, layer_tokens=1)


@pytest.mark.parametrize("steps", range(8))
def test_a_combine_cancelled_at_any_layer_frees_everything(steps: int, make_engine: EngineFactory) -> None:
    """One layer a step; the snapshot is ordered too, so that its pages are at stake."""
    rig = make_engine(SLOW)
    heard = rig.submit("r", live(20, 1), live(30, 2), snapshots=(SnapshotOrder(b"p", 1),), max_tokens=3)
    for _ in range(steps):
        rig.step()
    rig.engine.cancel("r")
    told = len(heard.events)
    rig.run()
    assert len(heard.events) == told
    rig.drop_all([b"p"])
    rig.assert_nothing_held()


@pytest.mark.parametrize("steps", range(12))
def test_a_capture_cancelled_at_any_layer_frees_everything(steps: int, make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    events = rig.submit_capture("c", CaptureSegment(b"one", IDS), CaptureSegment(b"two", draw_ids(40, 2)))
    for _ in range(steps):
        rig.step()
    rig.engine.cancel("c")
    told = len(events)
    rig.run()
    assert len(events) == told
    rig.drop_all([b"one", b"two"])
    rig.assert_nothing_held()


def test_cancelling_one_job_of_a_pack_keeps_the_other(make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    cancelled = rig.submit_capture("c1", CaptureSegment(b"one", IDS))
    kept = rig.submit_capture("c2", CaptureSegment(b"two", draw_ids(40, 2)))
    rig.step()
    rig.engine.cancel("c1")
    rig.run()
    assert cancelled == []
    assert [event.reason for event in kept] == [""]
    assert b"one" not in rig.context.store
    rig.drop_all([b"two"])
    rig.assert_nothing_held()


def test_cancelling_the_unknown_is_nothing(rig: EngineRig) -> None:
    rig.engine.cancel("nobody")
    rig.assert_nothing_held()


def test_waiting_requests_can_be_cancelled(make_engine: EngineFactory) -> None:
    rig = make_engine(EngineLimits(1024, max_running=1))
    first, second = rig.submit("a", live(10, 1)), rig.submit("b", live(10, 2))
    rig.step()
    rig.engine.cancel("b")
    rig.run()
    assert first.is_complete
    assert second.events == []


def test_a_prompt_without_room_waits_and_proceeds(make_engine: EngineFactory) -> None:
    """Twelve pages, less one of the prime: two prompts of six pages do not fit at once."""
    rig = make_engine(num_pages=12)
    first, second = (rig.submit(name, live(80, seed), max_tokens=10) for name, seed in (("a", 1), ("b", 2)))
    rig.step()
    assert rig.engine.num_waiting == 1
    rig.run()
    assert first.is_complete
    assert second.is_complete
    rig.assert_nothing_held()


def test_a_prompt_without_a_slot_waits_and_proceeds(make_engine: EngineFactory) -> None:
    rig = make_engine(num_slots=1)
    heard = [rig.submit(name, live(10, 1)) for name in "abc"]
    rig.step()
    assert rig.engine.num_waiting == 2
    rig.run()
    assert heard[0].tokens == heard[1].tokens == heard[2].tokens
    assert all(each.is_complete for each in heard)


def test_what_can_never_fit_is_refused(make_engine: EngineFactory) -> None:
    rig = make_engine(EngineLimits(200), num_pages=8)
    with pytest.raises(PromptTooLargeError, match="context length of 200"):
        rig.submit("long", live(190, 1), max_tokens=11)
    with pytest.raises(PromptTooLargeError, match="HYPIC_WORKER_PAGE_BYTES"):
        rig.submit("pages", live(120, 1), max_tokens=9)
    assert rig.engine.is_idle


def test_pages_of_the_prime_never_serve_a_prompt(make_engine: EngineFactory) -> None:
    """A prompt that needs them too can never be served; it must not wait for ever."""
    rig = make_engine(num_pages=8)
    with pytest.raises(PromptTooLargeError):
        rig.submit("all", live(100, 1), max_tokens=28)
    fits = rig.submit("fits", live(100, 1), max_tokens=12)
    rig.run()
    assert fits.is_complete


def test_snapshot_boundaries_count_as_pages(make_engine: EngineFactory) -> None:
    """The run behind a snapshot starts a page of its own: seven pages of tokens need eight."""
    rig = make_engine(num_pages=8)
    with pytest.raises(PromptTooLargeError):
        rig.submit("all", live(8, 1), live(100, 2), max_tokens=4, snapshots=(SnapshotOrder(b"p", 1),))


def test_seam_windows_and_the_question_share_pages() -> None:
    """Three windows of 3 tokens, a question of 5 and a reply of 2 fill one page of 16; behind a snapshot a page begins."""

    def plan(*, keep: bool) -> CombinePlan:
        stored = [CombinePart(IDS, SegmentState(IDS, 3, (), ()), keep=keep and index == 1) for index in range(3)]
        return CombinePlan(None, (*stored, CombinePart((1, 2, 3, 4, 5))), max_tokens=2)

    assert [plan(keep=keep).pages_needed(16) for keep in (False, True)] == [1, 2]
    assert [plan(keep=keep).pages_needed(4) for keep in (False, True)] == [4, 5]


def test_a_full_line_is_refused(make_engine: EngineFactory) -> None:
    rig = make_engine(EngineLimits(1024, max_waiting=2))
    rig.submit("a", live(5, 1))
    rig.submit("b", live(5, 1))
    with pytest.raises(EngineFullError):
        rig.submit("c", live(5, 1))
    rig.run()
    assert rig.submit("c", live(5, 1)).events == []


def test_a_state_dropped_in_use_keeps_serving(make_engine: EngineFactory) -> None:
    """Drop between admission and the end: pages stay with the prompt, and new work does not overwrite them."""

    def serve(drop_after: int | None) -> list[int]:
        rig = make_engine(SLOW)
        rig.capture(CaptureSegment(b"one", IDS))
        heard = rig.submit("r", segment(b"one", IDS), live(5, 2), max_tokens=24)
        for step in range(12):
            rig.step()
            if step == drop_after:
                assert rig.context.store.drop(b"one")
                rig.submit("other", live(120, 3), max_tokens=20)
        rig.run()
        rig.drop_all([b"one"])
        rig.assert_nothing_held()
        return heard.tokens

    expected = serve(None)
    assert len(expected) == 24
    for drop_after in (0, 1, 2, 5, 9):
        assert serve(drop_after) == expected


def test_a_state_dropped_before_admission_is_computed(make_engine: EngineFactory) -> None:
    """Eviction between lookup and use: the part becomes live."""
    rig = make_engine(EngineLimits(1024, max_running=1))
    rig.capture(CaptureSegment(b"one", IDS))
    rig.submit("a", live(10, 1), max_tokens=6)
    heard = rig.submit("b", segment(b"one", IDS), live(5, 2))
    rig.step()
    rig.context.store.drop(b"one")
    rig.run()
    assert heard.served[0].reason == "state_dropped"
    assert heard.is_complete


def test_drop_while_capturing(make_engine: EngineFactory) -> None:
    """There is nothing to drop yet; the capture ends well, and its state can be dropped then."""
    rig = make_engine(SLOW)
    events = rig.submit_capture("c", CaptureSegment(b"one", IDS))
    rig.step()
    assert not rig.context.store.drop(b"one")
    rig.run()
    assert [event.reason for event in events] == [""]
    assert rig.context.store.drop(b"one")
    rig.assert_nothing_held()


def test_a_segment_without_a_body_fails_alone(rig: EngineRig) -> None:
    """Whoever else is packed with it gets a state."""
    short, fine = CaptureSegment(b"short", draw_ids(5, 1)), CaptureSegment(b"fine", IDS)
    for order in ((short, fine), (fine, short)):
        events = {event.key: event for event in rig.capture(*order)}
        assert "no body" in events[b"short"].reason
        assert events[b"short"].size_bytes == 0
        assert events[b"fine"].reason == ""
        rig.drop_all([b"fine"])
    rig.assert_nothing_held()


def test_captures_without_room_together_run_one_by_one(make_engine: EngineFactory) -> None:
    """A pack that does not fit must not fail what would fit."""
    rig = make_engine(num_pages=10)
    events = rig.capture(CaptureSegment(b"one", IDS), CaptureSegment(b"big", draw_ids(200, 2)))
    assert [(event.key, event.reason == "") for event in events] == [(b"one", True), (b"big", False)]
    assert "pages" in events[1].reason
    rig.drop_all([b"one"])
    rig.assert_nothing_held()


def test_stored_states_make_room_for_prompts_and_captures(make_engine: EngineFactory) -> None:
    """A pool full of states keeps nobody waiting: the oldest go, save those that the prompt itself uses."""
    rig = make_engine(num_pages=14)
    rig.capture(CaptureSegment(b"old", IDS))
    rig.capture(CaptureSegment(b"used", draw_ids(40, 2)))
    heard = rig.submit("r", segment(b"used", draw_ids(40, 2)), live(100, 3), max_tokens=8)
    rig.run()
    assert heard.is_complete
    assert heard.served[0].reused_tokens
    assert (b"old" in rig.context.store, b"used" in rig.context.store) == (False, True)
    events = rig.capture(CaptureSegment(b"new", draw_ids(150, 4)))
    assert [event.reason for event in events] == [""]
    assert b"used" not in rig.context.store
    rig.drop_all([b"new"])
    rig.assert_nothing_held()


def test_the_same_segment_asked_for_twice_is_stored_once(rig: EngineRig) -> None:
    """In one job, by two jobs at once, and again later: every asker is told, the state is written once."""
    one = CaptureSegment(b"one", IDS)
    first = rig.submit_capture("c1", one, one)
    second = rig.submit_capture("c2", one)
    rig.run()
    state = rig.context.store.get(b"one")
    again = rig.capture(one)
    assert [event.reason for event in (*first, *second, *again)] == [""] * 4
    assert len({event.size_bytes for event in (*first, *second, *again)}) == 1
    assert rig.context.store.get(b"one") is state
    rig.drop_all([b"one"])
    rig.assert_nothing_held()


def test_background_captures_come_last(make_engine: EngineFactory) -> None:
    rig = make_engine(EngineLimits(1024, layer_tokens=1, capture_tokens=50))
    background = rig.submit_capture("bg", CaptureSegment(b"bg", IDS), background=True)
    urgent = rig.submit_capture("fg", CaptureSegment(b"fg", IDS))
    while not urgent:
        rig.step()
    assert background == []
    rig.run()
    assert len(background) == 1


def test_decoding_goes_on_while_a_long_prompt_combines(make_engine: EngineFactory) -> None:
    """A combine is resumable: every step decodes one token of the running request."""
    rig = make_engine(SLOW)
    first = rig.submit("a", live(5, 1), max_tokens=30)
    while not first.tokens:
        rig.step()
    long = rig.submit("b", live(300, 2), max_tokens=2)
    told = len(first.tokens)
    rig.step()
    rig.step()
    assert len(first.tokens) == told + 2
    assert not any(isinstance(event, PrefilledEvent) for event in long.events)
    rig.run()
    assert first.is_complete
    assert long.is_complete


def test_a_prompt_that_fits_only_without_its_states_is_served_without_them(make_engine: EngineFactory) -> None:
    """Its seam windows and bodies start pages of their own; with nothing else running nobody would ever make room."""
    rig = make_engine(num_pages=14)
    ids = [draw_ids(24, seed) for seed in range(4)]
    keys = [b"a", b"b", b"c", b"d"]
    rig.capture(*(CaptureSegment(key, own) for key, own in zip(keys, ids, strict=True)))
    assert all(key in rig.context.store for key in keys)
    heard = rig.submit(
        "r", *(segment(key, own) for key, own in zip(keys, ids, strict=True)), live(50, 9), max_tokens=30
    )
    rig.run()
    assert heard.is_complete
    assert {part.reason for part in heard.served[:-1]} == {"no_room"}
    assert all(part.reused_tokens == 0 for part in heard.served)
    rig.drop_all(keys)
    rig.assert_nothing_held()


def test_nested_snapshots_make_room_for_prompts(make_engine: EngineFactory) -> None:
    """Every turn's snapshot shares the pages of the one before it, and still none of them keeps a prompt waiting."""
    rig = make_engine(num_pages=12)
    turns = [live(24, seed) for seed in range(4)]
    orders = tuple(SnapshotOrder(bytes([turn]), turn) for turn in range(1, 4))
    rig.submit("conversation", *turns, snapshots=orders)
    rig.run()
    assert all(order.key in rig.context.store for order in orders)
    heard = rig.submit("other", live(140, 9), max_tokens=30)
    rig.run()
    assert heard.is_complete
    rig.drop_all(order.key for order in orders)
    rig.assert_nothing_held()


def test_logits_that_are_no_numbers_fail_their_request_alone(make_engine: EngineFactory) -> None:
    rig = make_engine(num_slots=2)
    healthy, broken = rig.submit("healthy", live(20, 1), max_tokens=6), rig.submit("broken", live(20, 2), max_tokens=6)
    rig.step()
    assert healthy.tokens
    assert broken.tokens
    with torch.inference_mode():
        rig.context.memory.linear_slots[0].states[0].fill_(float("nan"))
    rig.run()
    assert healthy.is_complete
    assert isinstance(broken.events[-1], FailedEvent)
    assert "not finite" in str(broken.events[-1].error)
    rig.assert_nothing_held()
