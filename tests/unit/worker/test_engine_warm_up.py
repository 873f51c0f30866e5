"""Made-up requests ahead of the first real one: they leave nothing behind, and never keep an engine from serving."""

import pytest

from services.worker.engine import warm_up as module
from services.worker.engine.limits import EngineLimits
from services.worker.engine.warm_up import warm_up
from tests.exactness.rig import draw_ids
from tests.unit.worker.conftest import EngineFactory
from tests.unit.worker.engine_rig import cold, live


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for a CPU."""
    monkeypatch.setattr(module, "_ALONE", (40, 64))
    monkeypatch.setattr(module, "_SHARED", (40,))
    monkeypatch.setattr(module, "_CAPTURED", (32, 64))
    monkeypatch.setattr(module, "RECORDED_TOKENS", 90)


def test_it_serves_every_kind_and_leaves_nothing(make_engine: EngineFactory) -> None:
    rig = make_engine(num_pages=400)
    done = warm_up(rig.engine)
    assert done.failed == 0
    # Of each round: prompts alone, shared sweeps, captures of one chunk beside prompts and alone, readers, a recompute.
    alone, shared = 2 * 2 + (3 + 1) + 1 + 1, 2 * (2 + 3 + 4)
    assert done.requests == 3 * alone + 2 * (shared + rig.engine.limits.max_running)
    assert len(done.combines) == alone - 1
    # What they compute: two lengths of live tokens alone, those beside captures with what is captured, the recompute.
    assert sorted(tokens for _, tokens in done.combines) == [40, 40, 64, 64, 91, 152, 152, 162, 272]
    assert [tokens for _, tokens in done.captures] == [32]
    assert all(seconds > 0 for seconds, _ in (*done.combines, *done.captures))
    assert rig.engine.is_idle
    rig.assert_nothing_held()


def test_what_is_served_behind_it_is_the_same(make_engine: EngineFactory) -> None:
    answers, ids = [], draw_ids(30, 3)
    for warms in (False, True):
        rig = make_engine(num_pages=400)
        if warms:
            warm_up(rig.engine)
        heard = rig.submit("r", live(9, 1), cold(b"d", ids), live(5, 2))
        rig.run()
        answers.append((heard.tokens, heard.logprobs))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("num_pages", "num_slots"), [(12, 6), (80, 1), (400, 1)])
def test_small_pools_are_warmed_as_far_as_they_go(num_pages: int, num_slots: int, make_engine: EngineFactory) -> None:
    rig = make_engine(EngineLimits(60, max_running=num_slots), num_pages=num_pages, num_slots=num_slots)
    assert warm_up(rig.engine).failed == 0
    rig.assert_nothing_held()


def test_a_store_without_room_is_said(make_engine: EngineFactory, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_engine(num_pages=400)
    rig.context.store.capacity_bytes = 1
    warm_up(rig.engine)
    assert "too small to warm up" in caplog.text
    rig.assert_nothing_held()


def test_requests_that_fail_are_counted(make_engine: EngineFactory, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_engine(num_pages=400)
    rig.context.model.head.fill_(float("nan"))
    assert warm_up(rig.engine).failed > 0
    assert "a request of the warm-up failed" in caplog.text
