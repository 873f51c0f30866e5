"""The router's benchmark measures requests that are answered whole, and notices those that are not."""

import asyncio
from dataclasses import replace

from bench.router.__main__ import Measured, Plan, rows_of
from bench.router.load import Shape, Timings, make_requests, run_open
from bench.router.processes import resident_bytes, serve_routers


def test_requests_pass_through_a_real_router_and_a_wrong_one_is_counted() -> None:
    requests = make_requests(Shape(libraries=1, orders=2))
    unknown = [each.replace(b'"instant"', b'"unknown"') for each in requests]
    with serve_routers(2) as routers:
        answered = asyncio.run(run_open(routers.ports, requests, 6, 50.0, seed=1))
        refused = asyncio.run(run_open(routers.ports, unknown, 2, 50.0, seed=1))
        assert all(resident_bytes(pid) > 1 << 20 for pid in routers.pids)
    assert (len(answered.whole), answered.failures) == (6, [])
    assert all(0 < first <= whole for first, whole in zip(answered.first_token, answered.whole, strict=True))
    assert len(refused.failures) == 2
    assert "404" in refused.failures[0]


def test_rows_tell_growth_and_time_a_request() -> None:
    timings = Timings([0.002] * 98 + [0.02] * 2, [0.003] * 100, [], 0.25)
    measured = Measured(timings, 0.2, 0.1, 100 << 20, 103 << 20, 1, 5e-5)
    plan = replace(Plan(), timed=100)
    values = {row.measure: row.value for row in rows_of(measured, plan, Shape())}
    assert [values[name] for name in values if name.startswith(("requests", "p99", "memory grown", "failed"))] == [
        400.0,
        20.0,
        3.0,
        1,
    ]
    assert values["router's processor time a request"] == 2.0
