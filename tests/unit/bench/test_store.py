"""The benchmark of the cache service runs over both directories; its figures mean nothing at this size."""

import math

import pytest

from bench.results import Row
from bench.store.__main__ import Load, measure_service
from bench.store.contract import read_report
from bench.store.load import percentile
from bench.store.policies import measure_policies
from bench.store.service import Shape, draw_plans
from services.cache.traces import TraceShape, draw_trace

SHAPE = Shape(entries=60, tenants=2, workers=3, parts=4)


@pytest.mark.parametrize("directory", ["memory", "redis"])
async def test_a_directory_is_measured(directory: str) -> None:
    rows = await measure_service(directory, SHAPE, Load(rate=50.0, seconds=1, plans=20, at_once=4))
    named = {row.measure.partition(",")[0]: row for row in rows}
    assert {"plan p99", "plan p50", "plans", "publishes", "calls refused"} <= set(named)
    assert all(math.isfinite(row.value) for row in rows)
    assert named["calls refused"].value == 0
    assert named["plans"].value > 0
    assert any(row.measure.startswith("Redis alone") for row in rows) == (directory == "redis")


def test_plans_are_of_one_tenant_and_of_distinct_documents() -> None:
    plans = draw_plans(SHAPE, 50, seed=1)
    assert plans == draw_plans(SHAPE, 50, seed=1)
    assert {plan.namespace.tenant for plan in plans} == {"tenant-0", "tenant-1"}
    assert all(len({entry.content_hash for entry in plan.entries}) == 4 for plan in plans)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_percentiles(share: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_policies_are_compared_on_each_trace() -> None:
    trace = draw_trace(TraceShape(requests=200, documents=50), seed=1)
    rows = list(measure_policies({"small": trace}))
    assert sum(row.measure.startswith("hit tokens, gdsf, small") for row in rows) == 3
    assert all(0 <= row.value <= 100 for row in rows if row.measure.startswith("hit tokens"))


def test_a_report_of_the_contract_becomes_rows() -> None:
    report = """<testsuites><testsuite>
      <testcase name="test_a[memory]"/>
      <testcase name="test_a[system-redis]"><skipped message="no redis-server"/></testcase>
      <testcase name="test_histories[redis-25-plain]"><properties>
        <property name="checks" value="12345"/><property name="of" value="redis, plain limits"/>
      </properties></testcase>
    </testsuite></testsuites>"""
    assert list(read_report(report)) == [
        Row("random steps, each with an integrity check behind it, redis, plain limits", 12345, "", 10_000),
        Row("tests passed, Redis 6.2 (wheel)", 1, ""),
        Row("tests passed, in memory", 1, ""),
        Row("tests skipped", 1, "", 0, better="lower"),
    ]
