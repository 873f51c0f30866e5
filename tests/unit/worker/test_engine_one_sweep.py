"""Requests that order captures: what shares a sweep, who computes what, and what cancellation, failure and want of room leave."""

import pytest
import torch

from services.worker.engine.capture_rows import CaptureRows
from services.worker.engine.limits import EngineLimits
from services.worker.engine.requests import CaptureEvent, CaptureSegment, PrefilledEvent, Serving
from services.worker.mixers.batch import Mixer
from tests.exactness.rig import draw_ids
from tests.unit.worker.conftest import EngineFactory
from tests.unit.worker.engine_rig import WINDOW, EngineRig, Heard, cold, live, segment

SLOW = EngineLimits(1024, layer_tokens=1)
# Two chunks and one.
LONG, SHORT = draw_ids(60, 1), draw_ids(30, 2)
BAD = (1 << 20,) * 30


def _ask(rig: EngineRig, name: str = "r", question: int = 9) -> Heard:
    return rig.submit(name, live(10, 3), cold(b"long", LONG), cold(b"short", SHORT), live(question, 4))


def _tokens_of_two_steps(make_engine: EngineFactory, question: int = 9) -> list[int]:
    rig = make_engine()
    rig.capture(CaptureSegment(b"long", LONG), CaptureSegment(b"short", SHORT))
    heard = rig.submit("r", live(10, 3), segment(b"long", LONG), segment(b"short", SHORT), live(question, 4))
    rig.run()
    return heard.tokens


def _end(rig: EngineRig) -> None:
    rig.drop_all([b"long", b"short"])
    rig.assert_nothing_held()


def _sweeps(rig: EngineRig, heard: Heard) -> int:
    """Sweeps until the first token: a step is one layer, or the begin of a sweep with its first layer."""
    for step in range(1, 300):
        rig.step()
        if heard.tokens:
            return round(step / (len(rig.context.model.layers) + 1))
    raise AssertionError("no first token")


@pytest.mark.parametrize(("capture_tokens", "sweeps"), [(1024, 2), (60, 3)])
def test_chunks_before_the_last_run_ahead(capture_tokens: int, sweeps: int, make_engine: EngineFactory) -> None:
    """A pack of both takes two chunks; apart they take three. The last one is swept with the prompt."""
    rig = make_engine(EngineLimits(1024, layer_tokens=1, capture_tokens=capture_tokens))
    heard = _ask(rig)
    assert _sweeps(rig, heard) == sweeps
    rig.run()
    assert heard.tokens == _tokens_of_two_steps(make_engine)
    _end(rig)


def test_what_fits_takes_one_sweep(make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    heard = rig.submit("r", cold(b"short", SHORT), live(9, 4))
    assert _sweeps(rig, heard) == 1
    rig.run()
    _end(rig)


def test_captures_are_told_before_the_prefill(rig: EngineRig) -> None:
    heard = _ask(rig)
    rig.run()
    first, second, prefilled, *_ = heard.events
    assert isinstance(first, CaptureEvent)
    assert isinstance(second, CaptureEvent)
    assert isinstance(prefilled, PrefilledEvent)
    for event, key in ((first, b"long"), (second, b"short")):
        state = rig.context.store.get(key)
        assert state is not None
        assert (event.key, event.reason) == (key, "")
        assert event.size_bytes == rig.context.store.size_bytes(state)
        assert 0.0 < event.seconds <= prefilled.combine_seconds
    assert [(part.live_tokens, part.reused_tokens, part.captured_tokens) for part in heard.served] == [
        (10, 0, 0), (WINDOW, 0, 60 - WINDOW), (WINDOW, 0, 30 - WINDOW), (9, 0, 0),
    ]  # fmt: skip
    assert heard.is_complete
    _end(rig)


def test_what_is_stored_already_is_a_hit_and_is_told(rig: EngineRig) -> None:
    """Its owner publishes it under the new ticket."""
    rig.capture(CaptureSegment(b"long", LONG))
    heard = _ask(rig)
    rig.run()
    assert heard.captured == {b"long": "", b"short": ""}
    assert [part.reused_tokens for part in heard.served] == [0, 60 - WINDOW, 0, 0]
    _end(rig)


def test_two_requests_that_order_the_same_compute_it_once(make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    heard = [_ask(rig, "a"), _ask(rig, "b", 12)]
    rig.run()
    assert [[part.captured_tokens for part in one.served] for one in heard] == [
        [0, 60 - WINDOW, 30 - WINDOW, 0], [0, 0, 0, 0],
    ]  # fmt: skip
    assert heard[1].served[1].reused_tokens == 60 - WINDOW
    assert [one.tokens for one in heard] == [_tokens_of_two_steps(make_engine, count) for count in (9, 12)]
    _end(rig)


def test_the_second_captures_when_the_first_is_cancelled(make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    first, second = _ask(rig, "a"), _ask(rig, "b")
    for _ in range(3):
        rig.step()
    rig.engine.cancel("a")
    rig.run()
    assert first.events == []
    assert second.captured == {b"long": "", b"short": ""}
    assert second.served[1].captured_tokens == 60 - WINDOW
    _end(rig)


def test_requests_with_other_segments_share_the_last_sweep(make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    heard = [rig.submit(str(key), cold(key, draw_ids(20, key[0])), live(5, 1)) for key in (b"x", b"y")]
    assert _sweeps(rig, heard[0]) == 1
    assert heard[1].tokens
    rig.run()
    rig.drop_all([b"x", b"y"])
    rig.assert_nothing_held()


@pytest.mark.parametrize("steps", range(0, 14))
@pytest.mark.parametrize("is_shared", [False, True])
def test_cancelled_at_any_layer(steps: int, is_shared: bool, make_engine: EngineFactory) -> None:
    """Alone it is free at once; beside another, whose answer does not change, when the sweep ends."""
    rig = make_engine(SLOW)
    heard = rig.submit("r", cold(b"short", SHORT), live(9, 4)) if is_shared else _ask(rig)
    other = rig.submit("other", cold(b"x", draw_ids(25, 9)), live(5, 5)) if is_shared else None
    for _ in range(steps):
        rig.step()
    rig.engine.cancel("r")
    told = len(heard.events)
    rig.engine.check_integrity()
    rig.run()
    assert len(heard.events) == told
    assert other is None or (other.is_complete and other.captured == {b"x": ""})
    rig.drop_all([b"x"])
    _end(rig)


def test_a_hit_waits_for_no_cold_request(make_engine: EngineFactory) -> None:
    """It runs between two layers of the other's sweep, and is told first."""
    rig = make_engine(SLOW)
    rig.capture(CaptureSegment(b"short", SHORT))
    slow = rig.submit("cold", cold(b"long", LONG), live(9, 4))
    rig.step()
    quick = rig.submit("hit", segment(b"short", SHORT), live(9, 5))
    while not quick.tokens:
        rig.step()
    assert slow.events == []
    rig.run()
    assert slow.is_complete
    _end(rig)


def test_a_cold_request_is_not_overtaken_for_ever(make_engine: EngineFactory) -> None:
    rig = make_engine(EngineLimits(1024, layer_tokens=1, sweep_tokens=1, max_running=3))
    slow = rig.submit("cold", cold(b"long", LONG), live(9, 4))
    overtaking = 0
    for number in range(200):
        if rig.engine.num_running + rig.engine.num_waiting < 3:
            rig.submit(f"r{number}", live(9, number), max_tokens=1)
            overtaking += 1
        rig.step()
        if slow.tokens:
            break
    assert slow.tokens
    assert overtaking > 8
    rig.run()
    _end(rig)


@pytest.mark.parametrize("with_other", [False, True])
@pytest.mark.parametrize("name", ["long", "short"])
def test_a_capture_that_fails_is_served_live(
    name: str, with_other: bool, make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chunk that runs ahead, or beside its prompt and another one, which are served too."""
    rig = make_engine(SLOW)
    key, ids = {"long": (b"long", LONG), "short": (b"short", SHORT)}[name]
    mix, calls = CaptureRows.mix, iter([False, True])

    def fail_once(rows: CaptureRows, mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
        if next(calls, False):
            raise RuntimeError("no memory")
        return mix(rows, mixer, normed)

    monkeypatch.setattr(CaptureRows, "mix", fail_once)
    heard = rig.submit("r", cold(key, ids), live(9, 4))
    other = rig.submit("other", cold(b"x", draw_ids(25, 9)), live(5, 5)) if with_other else None
    rig.run()
    assert list(heard.captured) == [key]
    assert heard.captured[key]
    assert [(part.serving, part.reason) for part in heard.served] == [
        (Serving.LIVE, "capture_failed"), (Serving.LIVE, ""),
    ]  # fmt: skip
    assert heard.is_complete
    assert other is None or other.is_complete
    rig.drop_all([b"x"])
    _end(rig)


def test_a_bad_segment_fails_its_own_request_alone(make_engine: EngineFactory) -> None:
    """Tokens that the model does not have: neither captured nor live can they be served."""
    rig = make_engine(SLOW)
    bad = rig.submit("bad", cold(b"bad", BAD), live(9, 4))
    good = rig.submit("good", cold(b"short", SHORT), live(9, 4))
    rig.run()
    assert not bad.tokens
    assert good.is_complete
    _end(rig)


def test_a_segment_without_a_body_is_live(rig: EngineRig) -> None:
    heard = rig.submit("r", cold(b"tiny", draw_ids(5, 1)), live(9, 4))
    rig.run()
    assert [part.reason for part in heard.served] == ["capture_failed", ""]
    rig.assert_nothing_held()


def test_what_can_not_be_captured_for_want_of_room_is_live(make_engine: EngineFactory) -> None:
    """Hits stay hits where they fit."""
    rig = make_engine(num_pages=12)
    rig.capture(CaptureSegment(b"short", SHORT))
    heard = rig.submit("r", segment(b"short", SHORT), cold(b"long", draw_ids(110, 8)), live(9, 4))
    rig.run()
    assert [part.reason for part in heard.served] == ["", "no_room", ""]
    assert heard.captured == {b"long": "no_room"}
    _end(rig)


def test_a_request_captures_no_more_than_the_store_holds(make_engine: EngineFactory) -> None:
    """Beside its hits; what is too much is live from the start, and nothing that the prompt uses is evicted for it."""
    rig = make_engine()
    rig.capture(CaptureSegment(b"short", SHORT))
    state = rig.context.store.get(b"short")
    assert state is not None
    rig.context.store.capacity_bytes = 2 * state.plane_bytes
    parts = (segment(b"short", SHORT), cold(b"x", draw_ids(25, 9)), cold(b"long", LONG), cold(b"x", draw_ids(25, 9)))
    heard = rig.submit("r", *parts, live(9, 4))
    rig.run()
    assert heard.captured == {b"x": ""}
    assert [part.reason for part in heard.served] == ["", "", "no_room", "", ""]
    assert {key for key in (b"short", b"x", b"long") if key in rig.context.store} == {b"short", b"x"}
    rig.drop_all([b"x"])
    _end(rig)


def test_it_waits_for_room_behind_what_runs(make_engine: EngineFactory) -> None:
    rig = make_engine(EngineLimits(1024, layer_tokens=1), num_pages=16)
    first = rig.submit("a", live(100, 1), max_tokens=40)
    rig.step()
    second = _ask(rig, "b")
    rig.run()
    assert first.is_complete
    assert second.captured == {b"long": "", b"short": ""}
    _end(rig)
