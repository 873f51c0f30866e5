"""What a worker counts of waits, tokens and its own evictions."""

import pytest
from prometheus_client import CollectorRegistry

from services.worker.adapters.metrics import TokenGaps, WorkerMetrics
from services.worker.engine.requests import PrefilledEvent
from services.worker.engine.states import StoreEviction
from tests.unit.worker.conftest import EngineFactory


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"hypic_worker_{name}", labels)


def test_waits_are_counted_by_eighths_of_the_depth_however_deep_the_model_is() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    waits = {0: 1.0, 2: 2.0, 3: 4.0, 23: 8.0}
    metrics.on_prefilled(PrefilledEvent((), 0.0, 0.0, 15.0, (), waits), 24)
    metrics.on_prefilled(PrefilledEvent((), 0.0, 0.0, 0.5, (), {2: 0.5}), 3)
    told = {eighth: value(registry, "layer_wait_seconds_total", eighth=str(eighth)) for eighth in range(1, 9)}
    # Three layers an eighth; the third of three layers begins in the sixth.
    assert told == {1: 3.0, 2: 4.0, 3: 0.0, 4: 0.0, 5: 0.0, 6: 0.5, 7: 0.0, 8: 8.0}


def test_a_reply_of_three_tokens_has_two_gaps() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    for length in (3, 1):
        gaps = TokenGaps(metrics)
        for _ in range(length):
            gaps.note_token()
    assert value(registry, "generation_tokens_total") == 4
    assert value(registry, "inter_token_latency_seconds_count") == 2


def test_what_the_store_evicts_is_counted_once(make_engine: EngineFactory) -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    engine = make_engine().engine
    metrics.read(engine)
    # Of 80 pages the prime holds one.
    assert value(registry, "kv_cache_usage_perc") == pytest.approx(1 / 80)
    engine.context.store.evictions[StoreEviction.PAGES] += 3
    for _ in range(2):
        metrics.read(engine)
    assert value(registry, "evictions_total", reason="pages") == 3
    assert value(registry, "evictions_total", reason="planes") == 0
