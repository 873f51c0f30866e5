"""How the engine serves the parts of a prompt: hits, lost states, empty and repeated parts, prefixes and snapshots."""

import pytest

from services.worker.engine.requests import (
    CaptureSegment,
    FinishedEvent,
    FinishReason,
    GenerateRequest,
    PromptPart,
    Serving,
    SnapshotOrder,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.engine.seam import SeamWindow
from tests.exactness.rig import draw_ids
from tests.unit.worker.conftest import EngineFactory
from tests.unit.worker.engine_rig import WINDOW, EngineRig, Heard, live, segment

IDS = draw_ids(60, 1)
OTHER = draw_ids(45, 2)


def _store(rig: EngineRig) -> None:
    for event in rig.capture(CaptureSegment(b"one", IDS), CaptureSegment(b"two", OTHER)):
        assert event.reason == ""
        assert event.size_bytes > 0


def _alone(make_engine: EngineFactory, *parts: PromptPart, max_tokens: int = 4) -> list[int]:
    """Tokens of an engine that computes everything."""
    rig = make_engine()
    heard = rig.submit("alone", *[PromptPart(part.token_ids) for part in parts], max_tokens=max_tokens)
    rig.run()
    return heard.tokens


def test_a_hit_recomputes_its_window_only(rig: EngineRig) -> None:
    _store(rig)
    heard = rig.submit("r", live(9, 3), segment(b"one", IDS), segment(b"two", OTHER), live(6, 4))
    rig.run()
    assert [part.serving for part in heard.served] == [Serving.LIVE, Serving.SEGMENT, Serving.SEGMENT, Serving.LIVE]
    assert [part.live_tokens for part in heard.served] == [9, WINDOW, WINDOW, 6]
    assert [part.reused_tokens for part in heard.served] == [0, 60 - WINDOW, 45 - WINDOW, 0]
    assert [part.tier for part in heard.served] == ["", "worker", "worker", ""]
    assert all(part.reason == "" for part in heard.served)
    assert heard.is_complete


def test_a_growing_window_is_each_segments_own(make_engine: EngineFactory) -> None:
    rig = make_engine(window=SeamWindow(6, 0.25, 40))
    segments = {b"short": draw_ids(20, 1), b"middle": draw_ids(61, 2), b"long": draw_ids(200, 3)}
    events = rig.capture(*(CaptureSegment(key, ids) for key, ids in segments.items()))
    assert [event.reason for event in events] == [""] * 3
    heard = rig.submit("r", live(9, 3), *(segment(key, ids) for key, ids in segments.items()), live(6, 4))
    rig.run()
    assert [part.live_tokens for part in heard.served] == [9, 6, 16, 40, 6]
    assert [part.reused_tokens for part in heard.served] == [0, 14, 45, 160, 0]
    (event,) = rig.capture(CaptureSegment(b"none", draw_ids(8, 4)))
    assert event.reason == "a segment of 8 tokens has no body behind a seam window of 6"
    rig.drop_all(segments)
    rig.assert_nothing_held()


def test_a_key_with_other_tokens_is_computed_and_says_why(rig: EngineRig, make_engine: EngineFactory) -> None:
    """A hash hit is compared with the stored token ids; wrong bytes are never served."""
    _store(rig)
    changed = (IDS[0] ^ 1, *IDS[1:])
    parts = (segment(b"one", changed), live(6, 4))
    heard = rig.submit("r", *parts)
    rig.run()
    assert heard.served[0].serving is Serving.LIVE
    assert heard.served[0].live_tokens == 60
    assert heard.served[0].reason == "state_dropped"
    assert heard.tokens == _alone(make_engine, *parts)


@pytest.mark.parametrize("lost", ["never", "dropped", "a prefix"])
def test_a_missing_state_is_computed_and_says_why(lost: str, rig: EngineRig, make_engine: EngineFactory) -> None:
    _store(rig)
    key = b"one" if lost == "dropped" else b"missing"
    rig.context.store.drop(b"one")
    if lost == "a prefix":
        rig.submit("p", PromptPart(IDS), live(1, 5), snapshots=(SnapshotOrder(key, 1),))
        rig.run()
    parts = (segment(key, IDS), live(6, 4))
    heard = rig.submit("r", *parts)
    rig.run()
    assert heard.served[0].serving is Serving.LIVE
    assert heard.served[0].reason == "state_dropped"
    assert heard.tokens == _alone(make_engine, *parts)


def test_an_all_hit_prompt_computes_its_last_part(rig: EngineRig) -> None:
    _store(rig)
    heard = rig.submit("r", segment(b"one", IDS), segment(b"two", OTHER))
    rig.run()
    assert [part.live_tokens for part in heard.served] == [WINDOW, 45]
    assert heard.served[1].serving is Serving.LIVE
    assert heard.served[1].reason == "last_part"
    assert heard.is_complete


def test_the_same_segment_twice(rig: EngineRig) -> None:
    _store(rig)
    heard = rig.submit("r", segment(b"one", IDS), segment(b"one", IDS), live(3, 4), max_tokens=30)
    rig.run()
    assert heard.is_complete
    assert len(heard.tokens) == 30
    rig.drop_all([b"one", b"two"])
    rig.assert_nothing_held()


def test_empty_parts(rig: EngineRig, make_engine: EngineFactory) -> None:
    """An empty document, at either end and between hits, changes nothing."""
    _store(rig)
    empty = PromptPart(())
    bare = rig.submit("bare", segment(b"one", IDS), segment(b"two", OTHER), live(5, 4))
    padded = rig.submit(
        "padded", empty, segment(b"one", IDS), empty, segment(b"", ()), segment(b"two", OTHER), live(5, 4)
    )
    rig.run()
    assert padded.tokens == bare.tokens
    assert padded.is_complete


def test_windows_longer_than_every_segment_are_full_recompute(make_engine: EngineFactory) -> None:
    """`w ≥ L`: no segment has a body, so nothing is stored and every token runs."""
    rig = make_engine()
    short = draw_ids(WINDOW, 6)
    (event,) = rig.capture(CaptureSegment(b"short", short))
    assert "no body" in event.reason
    parts = (segment(b"short", short), segment(b"short", short), live(5, 4))
    heard = rig.submit("r", *parts)
    rig.run()
    assert sum(part.live_tokens for part in heard.served) == 2 * WINDOW + 5
    assert heard.tokens == _alone(make_engine, *parts)


def test_snapshots_serve_the_next_turn(rig: EngineRig, make_engine: EngineFactory) -> None:
    """The history of a turn is a prefix of the next one; hits may stand in it."""
    first = (live(20, 5), live(11, 6))
    told = rig.submit("r1", *first, snapshots=(SnapshotOrder(b"p1", 1), SnapshotOrder(b"p2", 2)))
    rig.run()
    assert [snapshot.key for snapshot in told.prefilled.snapshots] == [b"p1", b"p2"]
    for key, covered in ((b"p1", 1), (b"p2", 2)):
        parts = [PromptPart(part.token_ids, Serving.PREFIX) for part in first[:covered]]
        rest = [*first[covered:], live(4, 7)]
        heard = rig.submit("r2", *parts, *rest, prefix_key=key, max_tokens=20)
        rig.run()
        assert [part.serving for part in heard.served[:covered]] == [Serving.PREFIX] * covered
        assert sum(part.live_tokens for part in heard.served) == sum(len(part.token_ids) for part in rest)
        assert heard.tokens == _alone(make_engine, *first, live(4, 7), max_tokens=20)


def test_a_prefix_of_other_tokens_is_computed(rig: EngineRig, make_engine: EngineFactory) -> None:
    rig.submit("r1", live(20, 5), live(1, 6), snapshots=(SnapshotOrder(b"p", 1),))
    rig.run()
    other = PromptPart(draw_ids(20, 8), Serving.PREFIX)
    heard = rig.submit("r2", other, live(4, 7), prefix_key=b"p")
    rig.run()
    assert heard.served[0].serving is Serving.LIVE
    assert heard.served[0].reason == "state_dropped"
    assert heard.tokens == _alone(make_engine, other, live(4, 7))


def test_a_prompt_that_is_all_prefix_computes_its_last_part(rig: EngineRig) -> None:
    first = live(20, 5)
    rig.submit("r1", first, live(7, 6), snapshots=(SnapshotOrder(b"p", 1),))
    rig.run()
    parts = [PromptPart(part.token_ids, Serving.PREFIX) for part in (first, live(7, 6))]
    heard = rig.submit("r2", *parts, prefix_key=b"p")
    rig.run()
    assert [part.live_tokens for part in heard.served] == [0, 7]
    assert heard.is_complete


def test_a_snapshot_outlives_the_states_it_was_composed_from(rig: EngineRig) -> None:
    """Its pages are its own references: dropping the segment leaves the snapshot's bytes."""
    _store(rig)
    parts = (segment(b"one", IDS), live(6, 4))
    rig.submit("r1", *parts, live(2, 5), snapshots=(SnapshotOrder(b"p", 2),))
    rig.run()
    covered = [PromptPart(part.token_ids, Serving.PREFIX) for part in parts]
    before = rig.submit("r2", *covered, live(2, 5), prefix_key=b"p")
    rig.run()
    rig.drop_all([b"one", b"two"])
    rig.capture(CaptureSegment(b"three", draw_ids(200, 9)))
    after = rig.submit("r3", *covered, live(2, 5), prefix_key=b"p")
    rig.run()
    assert after.tokens == before.tokens
    rig.drop_all([b"p", b"three"])
    rig.assert_nothing_held()


@pytest.mark.parametrize("covered", [1, 2, 3])
def test_a_snapshot_holds_what_was_composed_up_to_it(rig: EngineRig, covered: int) -> None:
    """Also one right behind a segment, whose body then ends it."""
    _store(rig)
    parts = (segment(b"one", IDS), segment(b"two", OTHER), live(6, 4))
    composed = rig.submit("r1", *parts, live(2, 5), snapshots=(SnapshotOrder(b"p", covered),), max_tokens=20)
    rig.run()
    assert [snapshot.key for snapshot in composed.prefilled.snapshots] == [b"p"]
    prefix = [PromptPart(part.token_ids, Serving.PREFIX) for part in parts[:covered]]
    heard = rig.submit("r2", *prefix, *parts[covered:], live(2, 5), prefix_key=b"p", max_tokens=20)
    rig.run()
    assert [part.serving for part in heard.served[:covered]] == [Serving.PREFIX] * covered
    assert heard.tokens == composed.tokens


def test_no_snapshot_is_kept_of_what_was_not_served_as_asked(rig: EngineRig) -> None:
    """Its key says that the segment was composed; it was computed in place."""
    _store(rig)
    rig.drop_all([b"one"])
    orders = (SnapshotOrder(b"p1", 1), SnapshotOrder(b"p2", 2), SnapshotOrder(b"p3", 3))
    heard = rig.submit("r", live(9, 3), segment(b"one", IDS), live(6, 4), live(2, 5), snapshots=orders)
    rig.run()
    assert heard.served[1].reason == "state_dropped"
    assert [snapshot.key for snapshot in heard.prefilled.snapshots] == [b"p1"]
    rig.drop_all([b"p1", b"two"])
    rig.assert_nothing_held()


def test_the_same_snapshot_twice_is_kept_once(rig: EngineRig) -> None:
    for _ in range(2):
        heard = rig.submit("r", live(20, 5), live(1, 6), snapshots=(SnapshotOrder(b"p", 1),))
        rig.run()
    assert heard.prefilled.snapshots == ()
    rig.drop_all([b"p"])
    rig.assert_nothing_held()


def test_stop_ids_end_a_reply(rig: EngineRig) -> None:
    """The stop token is counted but not told."""
    whole = rig.submit("whole", live(12, 3), max_tokens=12)
    rig.run()
    stop = whole.tokens[5]
    heard = Heard()
    sampling = SamplingOptions(12, stop_ids=frozenset({stop}))
    rig.engine.submit(GenerateRequest("stopped", (live(12, 3),), sampling, heard.events.append))
    rig.run()
    first = whole.tokens.index(stop)
    assert heard.tokens == whole.tokens[:first]
    assert isinstance(heard.events[-1], FinishedEvent)
    assert heard.events[-1].reason is FinishReason.STOP
    assert heard.events[-1].generated_tokens == first + 1
    assert isinstance(whole.events[-1], FinishedEvent)
    assert whole.events[-1].reason is FinishReason.LENGTH
