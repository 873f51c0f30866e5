"""Tags, switches and events, as the router keeps them."""

import pytest

from services.router.domain.divergence import Comparison
from services.router.guard import GuardPolicy, ModelVersion, QualityGuard, SampleOutcome

BUDGET = 0.25


class Recorded:
    """Implements `GuardMetrics`."""

    def __init__(self) -> None:
        self.outcomes: list[SampleOutcome] = []
        self.modes: dict[str, bool] = {}
        self.switches: list[tuple[str, str]] = []

    def count_sample(self, outcome: SampleOutcome) -> None:
        self.outcomes.append(outcome)

    def observe(self, model: str, tag: str, sample: Comparison) -> None:
        assert model
        assert sample.divergence >= 0
        assert tag

    def set_mode(self, model: str, tag: str, *, is_exact: bool) -> None:
        self.modes[tag] = is_exact

    def count_switch(self, model: str, tag: str, cause: str) -> None:
        self.switches.append((tag, cause))


POLICY = GuardPolicy(0.01, BUDGET, {"legal": 0.05}, {"acme": "gold"})
FIRST = ModelVersion("m", "1", "p")
BAD, GOOD = Comparison(5.0, 0.0), Comparison(0.0, 1.0)


def broken_guard() -> tuple[QualityGuard, Recorded]:
    metrics = Recorded()
    guard = QualityGuard(POLICY, metrics, clock=lambda: 7.0)
    guard.follow(FIRST)
    while not guard.is_exact("legal"):
        guard.note(FIRST, "legal", BAD)
    return guard, metrics


def test_tags_are_configured_ones_or_the_tenants_group() -> None:
    assert POLICY.tag_of("legal", "acme") == "legal"
    assert POLICY.tag_of("gold", "beta") == "gold"
    assert POLICY.tag_of("made up", "acme") == "gold"
    assert POLICY.tag_of("", "beta") == "other"
    assert [POLICY.budget_of(tag) for tag in ("legal", "gold")] == [0.05, BUDGET]


def test_a_switch_is_told_with_its_evidence_and_touches_its_tag_alone() -> None:
    guard, metrics = broken_guard()
    assert not guard.is_exact("other")
    (event,) = guard.report().events
    assert (event.at, event.model, event.tag, event.is_exact, event.cause) == (7.0, FIRST, "legal", True, "divergence")
    assert event.record.mean_divergence == pytest.approx(12 * 0.05)
    assert event.record.num_samples <= 20
    assert event.record.evidence >= 1e6
    assert metrics.modes == {"legal": True}
    assert metrics.switches == [("legal", "divergence")]
    while guard.is_exact("legal"):
        guard.note(FIRST, "legal", GOOD)
    assert [each.cause for each in guard.report().events] == ["recovery", "divergence"]
    assert metrics.modes == {"legal": False}


def test_of_a_new_model_nothing_is_known() -> None:
    guard, metrics = broken_guard()
    guard.follow(ModelVersion("m", "2", "p"))
    assert not guard.is_exact("legal")
    assert metrics.switches[-1] == ("legal", "new_model")
    for _ in range(100):
        guard.note(FIRST, "legal", BAD)
    assert not guard.is_exact("legal")
    assert guard.report().tags == ()


def test_a_tag_that_does_without_composing_is_looked_at_more_often() -> None:
    guard, _ = broken_guard()
    taken = {tag: sum(guard.takes(tag) for _ in range(5_000)) for tag in ("legal", "other")}
    assert taken == {"legal": pytest.approx(500, abs=5), "other": pytest.approx(50, abs=2)}


def test_nothing_grows_without_bound() -> None:
    guard, _ = broken_guard()
    for _ in range(100):
        while guard.is_exact("legal"):
            guard.note(FIRST, "legal", GOOD)
        while not guard.is_exact("legal"):
            guard.note(FIRST, "legal", BAD)
    report = guard.report()
    assert len(report.events) == 64
    assert all(len(each.record.recent) <= 64 for each in report.tags)
