"""Prompts that use states while they come: the same tokens as with states that were there, whatever comes when, or not at all."""

import random

import pytest

from services.worker.engine.limits import EngineLimits
from services.worker.engine.requests import CaptureSegment, FetchEvent, Serving
from tests.exactness.rig import draw_ids
from tests.unit.worker.conftest import EngineFactory
from tests.unit.worker.engine_rig import WINDOW, Elsewhere, EngineRig, Heard, cold, fetched, live, segment

SLOW = EngineLimits(1024, layer_tokens=1)
IDS = {b"a": draw_ids(60, 1), b"b": draw_ids(30, 2), b"c": draw_ids(45, 5)}


def ask(rig: EngineRig, name: str = "r", question: int = 9) -> Heard:
    parts = [fetched(key, ids) for key, ids in IDS.items()]
    return rig.submit(name, live(10, 3), *parts, live(question, 4))


def expected(make_engine: EngineFactory, question: int = 9, live_keys: tuple[bytes, ...] = ()) -> list[int]:
    """Tokens where every state is there before the prompt; segments of `live_keys` are computed in place."""
    rig = make_engine()
    rig.capture(*(CaptureSegment(key, ids) for key, ids in IDS.items() if key not in live_keys))
    heard = rig.submit("r", live(10, 3), *(segment(key, ids) for key, ids in IDS.items()), live(question, 4))
    rig.run()
    return heard.tokens


@pytest.fixture
def elsewhere(make_engine: EngineFactory) -> Elsewhere:
    return Elsewhere.capture(make_engine(), IDS)


def finish(rig: EngineRig, elsewhere: Elsewhere, event: FetchEvent) -> None:
    elsewhere.bring(event, 100)
    rig.engine.finish_arrival(event.key, event.incoming)


def fail(rig: EngineRig, event: FetchEvent, reason: str = "lost") -> None:
    rig.engine.fail_arrival(event.key, event.incoming, reason)


def end(rig: EngineRig) -> None:
    rig.drop_all(IDS)
    rig.assert_nothing_held()


@pytest.mark.parametrize("seed", range(6))
def test_layers_that_come_in_any_order_of_states(seed: int, elsewhere: Elsewhere, make_engine: EngineFactory) -> None:
    """Negative control: another state's layers give other tokens."""
    source = random.Random(seed)
    rig = make_engine(SLOW)
    heard = ask(rig)
    rig.step()
    left = heard.fetches
    assert [event.key for event in left] == list(IDS)
    while left:
        event = source.choice(left)
        elsewhere.bring(event, source.randint(0, 2))
        rig.engine.wake()
        for _ in range(source.randint(0, 3)):
            rig.step()
        if event.incoming.is_present and source.random() < 0.7:
            left.remove(event)
            rig.engine.finish_arrival(event.key, event.incoming)
    rig.run()
    assert heard.tokens == expected(make_engine)
    assert [part.serving for part in heard.served[1:4]] == [Serving.SEGMENT] * 3
    assert [part.reused_tokens for part in heard.served[1:4]] == [len(ids) - WINDOW for ids in IDS.values()]
    assert heard.is_complete
    end(rig)


def test_other_layers_give_other_tokens(elsewhere: Elsewhere, make_engine: EngineFactory) -> None:
    wrong = Elsewhere({key: list(layers) for key, layers in elsewhere.layers.items()})
    wrong.layers[b"a"][0] = {**wrong.layers[b"a"][0], "end_state": wrong.layers[b"a"][0]["end_state"] * 5}
    rig = make_engine()
    heard = ask(rig)
    rig.step()
    for event in heard.fetches:
        finish(rig, wrong, event)
    rig.run()
    assert heard.tokens != expected(make_engine)


def test_a_layer_runs_as_soon_as_all_its_parts_are_there(elsewhere: Elsewhere, make_engine: EngineFactory) -> None:
    """And not before; the last state's last layer is all that the rest waits for."""
    rig = make_engine(SLOW)
    heard = ask(rig)
    rig.run()
    assert not heard.tokens
    num_layers = len(rig.context.model.layers)
    first, *others = heard.fetches
    for event in others:
        elsewhere.bring(event, num_layers)
    rig.engine.wake()
    rig.run()
    assert _layers_run(rig) == 0
    for layer in range(num_layers):
        assert not heard.tokens
        elsewhere.bring(first, 1)
        rig.engine.wake()
        rig.run()
        assert _layers_run(rig) == (0 if layer == num_layers - 1 else layer + 1)
    assert heard.tokens == expected(make_engine)
    assert heard.prefilled.fetch_seconds > 0
    # Every layer was waited for.
    assert sorted(heard.prefilled.layer_waits) == list(range(num_layers))
    assert sum(heard.prefilled.layer_waits.values()) == heard.prefilled.fetch_seconds
    for event in heard.fetches:
        rig.engine.finish_arrival(event.key, event.incoming)
    end(rig)


def _layers_run(rig: EngineRig) -> int:
    """Of the one sweep under way."""
    return sum(running.layer for running in rig.engine._prefill._running)  # progress shows nowhere else


def test_an_engine_that_waits_for_layers_is_idle(elsewhere: Elsewhere, make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    heard = ask(rig)
    assert not rig.engine.is_idle
    rig.run()
    assert rig.engine.is_idle
    assert rig.engine.has_work
    elsewhere.bring(heard.fetches[0], 1)
    rig.engine.wake()
    assert not rig.engine.is_idle
    for event in heard.fetches:
        fail(rig, event)
    rig.run()
    assert heard.is_complete
    end(rig)


def test_others_go_on_while_a_prompt_waits(elsewhere: Elsewhere, make_engine: EngineFactory) -> None:
    """Prompts with nothing to wait for, captures, and a prompt that waits for less."""
    rig = make_engine(SLOW)
    waiting = ask(rig, "waiting")
    rig.run()
    other = rig.submit("other", live(12, 7))
    captured = rig.submit_capture("capture", CaptureSegment(b"d", draw_ids(40, 8)))
    ordering = rig.submit("ordering", cold(b"e", draw_ids(35, 9)), live(5, 10))
    brief = rig.submit("brief", fetched(b"f", IDS[b"b"]), live(5, 11))
    rig.run()
    assert other.is_complete
    assert ordering.is_complete
    assert [event.reason for event in captured] == [""]
    (event,) = brief.fetches
    for layer in elsewhere.layers[b"b"]:
        event.incoming.write_layer(event.incoming.layers_present, layer)
    rig.engine.finish_arrival(event.key, event.incoming)
    rig.run()
    assert brief.is_complete
    assert not waiting.tokens
    for event in waiting.fetches:
        finish(rig, elsewhere, event)
    rig.run()
    assert waiting.tokens == expected(make_engine)
    rig.drop_all([b"d", b"e", b"f"])
    end(rig)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_what_fails_at_any_layer_is_computed_in_its_place(
    layers: int, elsewhere: Elsewhere, make_engine: EngineFactory
) -> None:
    rig = make_engine(SLOW)
    heard = ask(rig)
    rig.run()
    first, second, third = heard.fetches
    for event in heard.fetches:
        elsewhere.bring(event, layers)
    rig.engine.wake()
    rig.run()
    fail(rig, second, "blob_damaged")
    finish(rig, elsewhere, first)
    rig.run()
    assert not heard.tokens
    finish(rig, elsewhere, third)
    rig.run()
    assert heard.tokens == expected(make_engine, live_keys=(b"b",))
    assert (heard.served[2].serving, heard.served[2].reason) == (Serving.LIVE, "blob_damaged")
    assert len(heard.fetches) == 3
    assert heard.is_complete
    end(rig)


def test_prompts_share_what_comes(elsewhere: Elsewhere, make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    first, second = ask(rig, "first"), ask(rig, "second", 12)
    rig.run()
    assert len(first.fetches) == 3
    assert second.fetches == []
    rig.engine.cancel("first")
    for event in first.fetches:
        finish(rig, elsewhere, event)
    rig.run()
    assert not first.tokens
    assert second.tokens == expected(make_engine, 12)
    end(rig)


def test_both_prompts_that_share_what_fails_compute_it(elsewhere: Elsewhere, make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    first, second = ask(rig, "first"), ask(rig, "second", 12)
    rig.run()
    for event in first.fetches:
        if event.key == b"b":
            fail(rig, event)
        else:
            finish(rig, elsewhere, event)
    rig.run()
    assert first.tokens == expected(make_engine, live_keys=(b"b",))
    assert second.tokens == expected(make_engine, 12, live_keys=(b"b",))
    end(rig)


@pytest.mark.parametrize("steps", [0, 1, 4, 9])
def test_cancelled_prompts_hold_nothing(steps: int, elsewhere: Elsewhere, make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    heard = ask(rig)
    for _ in range(steps):
        rig.step()
        for event in heard.fetches:
            elsewhere.bring(event, 1)
        rig.engine.wake()
    rig.engine.cancel("r")
    for event in heard.fetches:
        fail(rig, event)
    rig.run()
    assert not rig.engine.has_work
    end(rig)


def test_a_capture_that_was_quicker_stays(elsewhere: Elsewhere, make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW)
    heard = ask(rig)
    rig.run()
    rig.capture(CaptureSegment(b"a", IDS[b"a"]))
    captured = rig.context.store.get(b"a")
    for event in heard.fetches:
        finish(rig, elsewhere, event)
    rig.run()
    assert rig.context.store.get(b"a") is captured
    assert heard.tokens == expected(make_engine)
    end(rig)


def test_a_prompt_whose_states_find_no_room_computes_them(make_engine: EngineFactory) -> None:
    """There is room for the prompt alone."""
    rig = make_engine(SLOW, num_pages=11)
    heard = ask(rig, question=5)
    rig.run()
    assert heard.fetches == []
    assert {part.reason for part in heard.served[1:4]} == {"no_room"}
    assert heard.is_complete
    end(rig)


def test_states_wait_for_room_before_they_are_fetched(elsewhere: Elsewhere, make_engine: EngineFactory) -> None:
    rig = make_engine(SLOW, num_pages=18)
    running = rig.submit("running", live(150, 3), max_tokens=8)
    heard = ask(rig)
    rig.step()
    assert heard.fetches == []
    rig.run()
    assert running.is_complete
    for event in heard.fetches:
        finish(rig, elsewhere, event)
    rig.run()
    assert heard.tokens == expected(make_engine)
    end(rig)


def test_captures_and_fetches_of_one_prompt(elsewhere: Elsewhere, make_engine: EngineFactory) -> None:
    """Its own captures run ahead, and share the sweep that waits; failed fetches leave them as they are."""
    for fails in (False, True):
        rig = make_engine(SLOW)
        a, b, c = IDS.items()
        heard = rig.submit("r", live(10, 3), fetched(*a), cold(*b), fetched(*c), live(9, 4))
        rig.run()
        first, second = heard.fetches
        finish(rig, elsewhere, first)
        if fails:
            fail(rig, second)
        else:
            finish(rig, elsewhere, second)
        rig.run()
        assert heard.tokens == expected(make_engine, live_keys=(b"c",) if fails else ())
        assert heard.captured == {b"b": ""}
        assert heard.served[2].captured_tokens == 30 - WINDOW
        end(rig)
