"""Requests that wait for room are let in by priority, then as they came, whatever came when."""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.engine.limits import EngineLimits
from services.worker.engine.requests import (
    EngineFullError,
    FailedEvent,
    GenerateEvent,
    GenerateRequest,
    PrefilledEvent,
)
from services.worker.engine.sampling import SamplingOptions
from tests.exactness.rig import draw_ids
from tests.unit.worker.conftest import EngineFactory
from tests.unit.worker.engine_rig import EngineRig, cold, live


@dataclass
class Order:
    """In which order requests began."""

    rig: EngineRig
    began: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def submit(self, name: str, priority: int, max_tokens: int = 1, tenant: bytes = b"") -> None:
        def hear(event: GenerateEvent) -> None:
            if isinstance(event, PrefilledEvent):
                self.began.append(name)
            if isinstance(event, FailedEvent):
                assert isinstance(event.error, EngineFullError)
                self.refused.append(name)

        parts = (live(6, 3),)
        self.rig.engine.submit(
            GenerateRequest(name, parts, SamplingOptions(max_tokens), hear, priority=priority, tenant=tenant)
        )


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_line_is_sorted_and_stable(make_engine: EngineFactory, priorities: list[int]) -> None:
    order = Order(make_engine(EngineLimits(1024, max_running=1)))
    for index, priority in enumerate(priorities):
        order.submit(str(index), priority)
    order.rig.run()
    assert order.began == [str(index) for index in sorted(range(len(priorities)), key=lambda each: priorities[each])]


@pytest.mark.parametrize("steps", [1, 3])
def test_what_runs_is_not_interrupted_and_a_later_one_passes_those_who_wait(
    make_engine: EngineFactory, steps: int
) -> None:
    order = Order(make_engine(EngineLimits(1024, max_running=1)))
    order.submit("running", 0, max_tokens=6)
    for _ in range(steps):
        order.rig.step()
    order.submit("waiting", 0)
    order.submit("batch", 5)
    order.submit("urgent", -1)
    order.rig.run()
    assert order.began == ["running", "urgent", "waiting", "batch"]


@pytest.mark.parametrize("max_running", [1, 6])
def test_a_tenant_with_many_requests_holds_up_no_other(make_engine: EngineFactory, max_running: int) -> None:
    """Where they wait for room, and where they wait for their sweep."""
    order = Order(make_engine(EngineLimits(1024, max_running=max_running, sweep_tokens=1)))
    for index in range(12):
        order.submit(f"hot {index}", 0, tenant=b"hot")
    order.rig.step()
    order.submit("quiet", 0, tenant=b"quiet")
    order.rig.run()
    assert order.began.index("quiet") <= 2 + (max_running - 1)
    assert [name for name in order.began if name != "quiet"] == [f"hot {index}" for index in range(12)]


def test_who_fills_the_line_is_refused_first(make_engine: EngineFactory) -> None:
    order = Order(make_engine(EngineLimits(1024, max_waiting=3, max_running=1)))
    for index in range(3):
        order.submit(f"hot {index}", 0, tenant=b"hot")
    order.submit("quiet", 0, tenant=b"quiet")
    assert order.refused == ["hot 2"]
    with pytest.raises(EngineFullError):
        order.submit("hot 3", 0, tenant=b"hot")
    order.rig.run()
    assert sorted(order.began) == ["hot 0", "hot 1", "quiet"]


def test_who_waits_for_anothers_capture_lets_others_ahead(make_engine: EngineFactory) -> None:
    rig = make_engine(EngineLimits(1024, layer_tokens=1))
    ids = draw_ids(40, 1)
    first, second = (rig.submit(name, cold(b"a", ids), live(6, 2)) for name in ("first", "second"))
    third = rig.submit("third", live(6, 3))
    rig.step()
    assert rig.engine.num_waiting == 1
    rig.run()
    assert all(heard.is_complete for heard in (first, second, third))
    assert first.captured == {b"a": ""}
    assert second.served[0].captured_tokens == 0
