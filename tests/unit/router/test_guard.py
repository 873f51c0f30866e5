"""The guard's test over simulated sequences: faults are found within 200 samples, healthy tags never fall back."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from services.router.domain.divergence import Comparison
from services.router.domain.guard import Switch, TagRecord, is_sampled, observe

BUDGET = 0.25
SEEDS = range(12)
# As measured on the demo model; see its `command`.
MEASURED: dict[str, list[float]] = json.loads(
    (Path(__file__).parents[2] / "data" / "guard_divergences.json").read_text()
)["nats"]
FAULTS = sorted(set(MEASURED) - {"healthy"})


def samples_until_switch(draw: Callable[[], float], most: int, record: TagRecord) -> int | None:
    for number in range(1, most + 1):
        found = observe(record, Comparison(draw(), 1.0), BUDGET)
        if isinstance(found, Switch):
            assert found.after.is_exact != record.is_exact
            return number
        record = found
    return None


def after_healthy(source: random.Random, count: int) -> TagRecord:
    record = TagRecord()
    for _ in range(count):
        found = observe(record, Comparison(source.choice(MEASURED["healthy"]), 1.0), BUDGET)
        assert isinstance(found, TagRecord)
        record = found
    return record


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_tag_composes_for_ten_thousand_samples(seed: int) -> None:
    source = random.Random(seed)
    assert samples_until_switch(lambda: source.choice(MEASURED["healthy"]), 10_000, TagRecord()) is None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mean", [0.5 * BUDGET, 0.9 * BUDGET])
@pytest.mark.parametrize("tail", [1.0, 8.0])
def test_losses_within_the_budget_raise_no_alarm_however_they_are_spread(seed: int, mean: float, tail: float) -> None:
    """tail: one sample in so many has all of it."""
    source = random.Random(seed)
    assert samples_until_switch(
        lambda: source.expovariate(1 / (mean * tail)) if source.random() < 1 / tail else 0.0, 10_000, TagRecord()
    ) is None  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("healthy_before", [0, 3_000])
def test_a_planted_fault_is_found_within_200_samples(seed: int, fault: str, healthy_before: int) -> None:
    source = random.Random(seed)
    before = after_healthy(source, healthy_before)
    found = samples_until_switch(lambda: source.choice(MEASURED[fault]), 200, before)
    assert found is not None


@pytest.mark.parametrize("seed", SEEDS)
def test_one_answer_in_two_that_is_another_is_found_within_200_samples(seed: int) -> None:
    source = random.Random(seed)
    assert samples_until_switch(lambda: 3.0 * (source.random() < 0.5), 200, TagRecord()) is not None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tag_comes_back_when_its_fault_is_gone_and_not_before(seed: int) -> None:
    source = random.Random(seed)
    exact = TagRecord(is_exact=True)
    for fault in FAULTS:
        assert samples_until_switch(lambda f=fault: source.choice(MEASURED[f]), 10_000, exact) is None  # type: ignore[misc]
    assert samples_until_switch(lambda: source.choice(MEASURED["healthy"]), 2_000, exact) is not None


def test_no_single_sample_switches_a_tag() -> None:
    worst = [observe(TagRecord(is_exact=is_exact), Comparison(1e9, 0.0), BUDGET) for is_exact in (False, True)]
    assert not any(isinstance(found, Switch) for found in worst)
    assert isinstance(observe(TagRecord(is_exact=True), Comparison(0.0, 1.0), BUDGET), TagRecord)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("stride", [1, 2, 3, 7])
def test_the_share_is_kept_also_of_every_nth_request(share: float, stride: int) -> None:
    numbers = range(stride, 20_000 * stride, stride)
    found = sum(is_sampled(number, share) for number in numbers) / len(numbers)
    assert found == pytest.approx(share, abs=0.002)
