"""Requests that refresh blocks: what they equal, whom they leave alone, what they reserve, and what fails with them."""

import math

import pytest
import torch

from services.worker.engine.context import EngineContext
from services.worker.engine.limits import EngineLimits
from services.worker.engine.refresh import BLOCKS, RefreshOrder, SweepCost
from services.worker.engine.refreshed_rows import AttendingRows, RefreshedRows
from services.worker.engine.requests import CaptureEvent, CaptureSegment, NotServedError, Serving, SnapshotOrder
from services.worker.engine.states import SegmentState
from services.worker.mixers.batch import Mixer
from tests.exactness.rig import draw_ids
from tests.unit.worker.conftest import EngineFactory
from tests.unit.worker.engine_rig import WINDOW, Elsewhere, EngineRig, Heard, cold, fetched, live, segment
from tests.unit.worker.test_engine_arrivals import end as end_arrivals
from tests.unit.worker.test_engine_arrivals import finish as bring_whole

SLOW = EngineLimits(1024, layer_tokens=1)
ALL, TWO = RefreshOrder(1 << 20), RefreshOrder(2)
IDS = {b"a": draw_ids(60, 1), b"b": draw_ids(30, 2), b"c": draw_ids(45, 5)}
QUESTION = 9


def ask(rig: EngineRig, refresh: RefreshOrder | None, name: str = "r") -> Heard:
    parts = [segment(key, ids) for key, ids in IDS.items()]
    return rig.submit(name, live(10, 3), *parts, live(QUESTION, 4), refresh=refresh)


def recomputed(make_engine: EngineFactory) -> Heard:
    rig = make_engine()
    heard = rig.submit("r", live(10, 3), *(segment(key, ids) for key, ids in IDS.items()), live(QUESTION, 4))
    rig.run()
    assert all(part.serving is Serving.LIVE for part in heard.served)
    return heard


def captured(rig: EngineRig) -> EngineRig:
    rig.capture(*(CaptureSegment(key, ids) for key, ids in IDS.items()))
    return rig


def error(found: Heard, expected: Heard) -> float:
    """Of log probabilities, step by step, relative; infinite where tokens differ."""
    if found.tokens != expected.tokens:
        return math.inf
    pairs = zip(found.logprobs, expected.logprobs, strict=True)
    return max(
        abs(one[token] - other[token]) / abs(other[token]) for one, other in pairs for token in one.keys() & other
    )


def planes_of(rig: EngineRig) -> list[object]:
    """The bytes of every stored state."""
    found: list[object] = []
    for state in rig.context.store:
        assert isinstance(state, SegmentState)
        found += [tensor.clone().numpy().tobytes() for plane in state.planes for tensor in plane.tensors]
        for pool in rig.context.memory.page_pools:
            slots = [slot for row in state.rows(0).rows(pool.keys.shape[1]) for slot in row.slots(pool.keys.shape[1])]
            found += [plane.flatten(0, 1)[slots].clone().numpy().tobytes() for plane in (pool.keys, pool.values)]
    return found


def end(rig: EngineRig) -> None:
    rig.drop_all(IDS)
    rig.assert_nothing_held()


def test_without_bound_it_is_a_full_recompute(make_engine: EngineFactory) -> None:
    expected = recomputed(make_engine)
    rig = captured(make_engine())
    heard = ask(rig, ALL)
    rig.run()
    assert error(heard, expected) < 1e-4
    assert [part.refreshed_tokens for part in heard.served] == [0, *(len(ids) - WINDOW for ids in IDS.values()), 0]
    assert all(part.reused_tokens == 0 for part in heard.served)
    plain = ask(rig, None)
    rig.run()
    assert error(plain, expected) > 1e-3
    end(rig)


def test_without_bound_under_a_budget_and_with_captures(make_engine: EngineFactory) -> None:
    rig = make_engine()
    order = RefreshOrder(None, 1e6, SweepCost(0.01, 0.001))
    parts = [cold(key, ids) for key, ids in IDS.items()]
    heard = rig.submit("r", live(10, 3), *parts, live(QUESTION, 4), refresh=order)
    rig.run()
    assert error(heard, recomputed(make_engine)) < 1e-4
    assert heard.captured == dict.fromkeys(IDS, "")
    end(rig)


@pytest.mark.parametrize(
    "order", [RefreshOrder(0), RefreshOrder(None, 0.001, SweepCost(1.0, 0.1)), RefreshOrder(None, 9.0)]
)
def test_no_block_is_no_refresh(order: RefreshOrder, make_engine: EngineFactory) -> None:
    """No room in the budget, or nothing measured yet."""
    rig = captured(make_engine())
    plain = ask(rig, None)
    rig.run()
    none = ask(rig, order)
    rig.run()
    assert none.logprobs == plain.logprobs
    assert none.served == plain.served
    end(rig)


def test_a_few_blocks_alter_the_reply_and_no_state_and_no_other_request(make_engine: EngineFactory) -> None:
    rig = captured(make_engine(SLOW))
    before, alone = planes_of(rig), ask(rig, None)
    rig.run()
    beside, heard = ask(rig, None, "beside"), ask(rig, TWO, "refreshing")
    rig.run()
    assert planes_of(rig) == before
    # Decoded in one batch with another one, sums round otherwise.
    assert error(beside, alone) < 1e-5
    assert heard.logprobs != alone.logprobs
    refreshed = [part.refreshed_tokens for part in heard.served]
    assert 0 < sum(refreshed) <= 2 * BLOCKS.block_tokens
    for part, ids in zip(heard.served[1:-1], IDS.values(), strict=True):
        assert part.live_tokens == WINDOW + part.refreshed_tokens
        assert part.live_tokens + part.reused_tokens == len(ids)
    again = ask(rig, None)
    rig.run()
    assert again.logprobs == alone.logprobs
    end(rig)


def test_a_repeated_segment_has_blocks_of_its_own_at_each_place(make_engine: EngineFactory) -> None:
    rig = captured(make_engine())
    twice = [segment(b"a", IDS[b"a"])] * 2
    heard = rig.submit("r", live(10, 3), *twice, live(QUESTION, 4), refresh=ALL)
    rig.run()
    plain = make_engine()
    expected = plain.submit("r", live(10, 3), *twice, live(QUESTION, 4))
    plain.run()
    assert error(heard, expected) < 1e-4
    end(rig)


def test_pages_are_reserved_before_anything_runs(make_engine: EngineFactory) -> None:
    """What a refresh may take is held from admission on; without room for it, and nothing to wait for, all is live."""
    rig = captured(make_engine(SLOW))
    free = rig.context.pages.num_free
    ask(rig, None, "plain")
    rig.engine._admit()
    plain = free - rig.context.pages.num_free
    rig.engine.cancel("plain")
    ask(rig, ALL, "all")
    rig.engine._admit()
    bodies = sum(len(ids) - WINDOW for ids in IDS.values())
    assert free - rig.context.pages.num_free >= plain + bodies // rig.context.pages.page_size
    rig.engine.cancel("all")
    assert rig.context.pages.num_free == free
    end(rig)


def test_without_room_it_is_computed_in_place(make_engine: EngineFactory) -> None:
    """Stored bodies hold 10 pages, the prompt takes 5, all blocks 8 more."""
    rig = captured(make_engine(num_pages=18))
    heard = ask(rig, ALL)
    rig.run()
    assert error(heard, recomputed(make_engine)) < 1e-4
    assert [part.reason for part in heard.served[1:-1]] == ["no_room"] * 3
    end(rig)


@pytest.mark.parametrize("steps", range(1, 12, 2))
def test_cancellation_frees_everything(steps: int, make_engine: EngineFactory) -> None:
    rig = captured(make_engine(SLOW))
    heard = ask(rig, TWO)
    for _ in range(steps):
        rig.step()
    rig.engine.cancel("r")
    rig.run()
    assert not heard.is_complete
    end(rig)


def test_states_on_their_way_serve_both_passes(make_engine: EngineFactory) -> None:
    elsewhere = Elsewhere.capture(make_engine(), IDS)
    rig = make_engine(SLOW)
    parts = [fetched(key, ids) for key, ids in IDS.items()]
    heard = rig.submit("r", live(10, 3), *parts, live(QUESTION, 4), refresh=TWO)
    rig.step()
    events = heard.fetches
    for _ in range(20):
        for event in events:
            elsewhere.bring(event, 1)
        rig.engine.wake()
        rig.run()
    for event in events:
        bring_whole(rig, elsewhere, event)
    rig.run()
    there = captured(make_engine())
    expected = ask(there, TWO)
    there.run()
    assert heard.logprobs == expected.logprobs
    assert [part.refreshed_tokens for part in heard.served] == [part.refreshed_tokens for part in expected.served]
    end_arrivals(rig)


@pytest.mark.parametrize("rows", [AttendingRows, RefreshedRows])
def test_a_refresh_that_fails_leaves_the_composed_reply(
    rows: type[AttendingRows | RefreshedRows], make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either pass; what was captured for it is told once."""

    def fail(self: object, mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a fault")

    monkeypatch.setattr(rows, "mix", fail)
    rig = make_engine()
    parts = [cold(key, ids) for key, ids in IDS.items()]
    heard = rig.submit("r", live(10, 3), *parts, live(QUESTION, 4), refresh=TWO)
    rig.run()
    assert heard.captured == dict.fromkeys(IDS, "")
    assert len([event for event in heard.events if isinstance(event, CaptureEvent)]) == len(IDS)
    plain = ask(rig, None)
    rig.run()
    assert heard.logprobs == plain.logprobs
    assert not any(part.refreshed_tokens for part in heard.served)
    end(rig)


def test_no_snapshot_is_published_behind_a_refreshed_part(make_engine: EngineFactory) -> None:
    rig = captured(make_engine())
    orders = (SnapshotOrder(b"s1", 1), SnapshotOrder(b"s3", 3))
    parts = [live(20, 3), segment(b"a", IDS[b"a"]), live(12, 6), live(QUESTION, 4)]
    heard = rig.submit("r", *parts, snapshots=orders, refresh=RefreshOrder(1))
    rig.run()
    assert [one.key for one in heard.prefilled.snapshots] == [b"s1"]
    plain = rig.submit("p", *parts, snapshots=orders[1:])
    rig.run()
    assert [one.key for one in plain.prefilled.snapshots] == [b"s3"]
    rig.drop_all([b"s1", b"s3"])
    end(rig)


def test_ranks_refuse_it(rig: EngineRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineContext, "is_split", property(lambda _: True))
    with pytest.raises(NotServedError, match="HYPIC_WORKER_TENSOR_PARALLEL"):
        ask(rig, TWO)
