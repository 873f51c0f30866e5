"""What the router counts of one reply: its tokens, by how they were served, add up to the prompt."""

import pytest
from prometheus_client import CollectorRegistry

from services.common.settings import SettingsError
from services.router.adapters.metrics import RouterMetrics
from services.router.domain.explain import (
    Explanation,
    FetchExplanation,
    PartExplanation,
    PlacingExplanation,
    Seconds,
    Usage,
)
from services.router.domain.parts import PartKind, Reason
from services.router.domain.plan import Served
from services.router.domain.ports import FinishReason
from services.router.reply import Done
from services.router.settings import RouterSettings

SECONDS = Seconds(plan=0.002, capture=0.0, fetch=0.03, queue=0.4, combine=0.1, decode=0.9, time_to_first_token=0.6)


def part(
    kind: PartKind,
    planned: Served,
    served: Served,
    counts: tuple[int, int, int],
    tier: str = "",
    reason: str | None = None,
    fetch: FetchExplanation | None = None,
) -> PartExplanation:
    live, captured, reused = counts
    return PartExplanation(
        kind, "", "", sum(counts), planned, served, live, captured, reused, tier, reason, None, fetch
    )


PARTS = (
    part(PartKind.PREFIX, Served.PREFIX, Served.PREFIX, (0, 0, 20), "host"),
    part(PartKind.SEGMENT, Served.HIT, Served.HIT, (8, 0, 92), "disk", fetch=FetchExplanation("", 0.02)),
    part(PartKind.SEGMENT, Served.COLD, Served.COLD, (8, 42, 0), "host", Reason.FIRST_USE),
    part(PartKind.SEGMENT, Served.PENDING, Served.HIT, (8, 0, 72), "same_host", fetch=FetchExplanation("w2", 0.01)),
    part(PartKind.SEGMENT, Served.PENDING, Served.LIVE, (60, 0, 0), reason=Reason.COMPUTED_ELSEWHERE),
    part(PartKind.SEGMENT, Served.HIT, Served.LIVE, (50, 0, 0), reason="blob_damaged"),
    part(PartKind.SEGMENT, Served.HIT, Served.LIVE, (30, 0, 0), reason="words of no vocabulary"),
    part(PartKind.LIVE, Served.LIVE, Served.LIVE, (11, 0, 0), reason=Reason.LAST_PART),
)
DONE = Done(
    FinishReason.STOP,
    Usage(sum(each.tokens for each in PARTS), 10, sum(each.reused_tokens for each in PARTS)),
    Explanation("compose", "parallel", PARTS, SECONDS, PlacingExplanation("w1", 0, 0, 0)),
)


def counted(groups: dict[str, str], tenant: str) -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, tenant_groups=groups)
    metrics.count_done(DONE, metrics.group_of(tenant))
    return registry


def total(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == f"hypic_{name}" and labels.items() <= sample.labels.items()
    )


def test_the_tokens_of_a_reply_add_up_to_its_prompt() -> None:
    registry = counted({}, "acme")
    by_served = {
        name: total(registry, "prompt_tokens_total", served=name) for name in ("prefix", "hit", "cold", "live")
    }
    assert by_served == {"prefix": 20, "hit": 164, "cold": 42, "live": 175}
    assert sum(by_served.values()) == DONE.usage.prompt_tokens
    assert total(registry, "reused_tokens_total") == DONE.usage.cached_tokens
    by_tier = {tier: total(registry, "reused_tokens_total", tier=tier) for tier in ("host", "disk", "same_host")}
    assert by_tier == {"host": 20, "disk": 92, "same_host": 72}
    assert total(registry, "generation_tokens_total") == DONE.usage.completion_tokens


def test_seams_are_the_live_tokens_of_composed_segments_alone() -> None:
    assert total(counted({}, "acme"), "seam_tokens_total") == 24


def test_a_part_that_another_request_captured_is_told_apart_by_how_it_ended() -> None:
    registry = counted({}, "acme")
    assert total(registry, "single_flighted_captures_total", served="hit") == 1
    assert total(registry, "single_flighted_captures_total", served="live") == 1


def test_fallbacks_have_the_reasons_that_are_known_and_other() -> None:
    registry = counted({}, "acme")
    reasons = ("computed_elsewhere", "blob_damaged", "other")
    assert [total(registry, "fallbacks_total", reason=reason) for reason in reasons] == [1, 1, 1]
    assert total(registry, "fallbacks_total") == 3


def test_every_stage_is_observed_once() -> None:
    registry = counted({}, "acme")
    for stage in ("plan", "capture", "fetch", "queue", "combine", "decode"):
        assert total(registry, f"request_{stage}_time_seconds_count") == 1
        assert total(registry, f"request_{stage}_time_seconds_sum") == getattr(SECONDS, stage)
    assert total(registry, "request_time_per_output_token_seconds_sum") == pytest.approx(0.1)


def test_metrics_name_groups_and_no_tenant() -> None:
    registry = counted({"acme": "gold"}, "acme")
    assert total(registry, "prompt_tokens_total", tenant_group="gold") == DONE.usage.prompt_tokens
    other = counted({"acme": "gold"}, "a secret name")
    assert total(other, "prompt_tokens_total", tenant_group="other") == DONE.usage.prompt_tokens
    labels = {value for metric in other.collect() for sample in metric.samples for value in sample.labels.values()}
    assert "a secret name" not in labels


@pytest.mark.parametrize(
    ("groups", "remedy"),
    [
        ({f"tenant-{number}": f"group-{number}" for number in range(16)}, "16 different groups; metrics can bear 15"),
        ({"acme": "two words"}, "the group 'two words' must be letters"),
    ],
)
def test_groups_stay_few_and_plain(groups: dict[str, str], remedy: str) -> None:
    with pytest.raises(SettingsError, match=remedy):
        RouterSettings.from_environment(tenant_groups=groups)


def test_fifteen_groups_and_the_rest_are_sixteen() -> None:
    groups = {f"tenant-{number}": f"group-{number}" for number in range(15)} | {"more": "other"}
    assert RouterSettings.from_environment(tenant_groups=groups).tenant_groups == groups
