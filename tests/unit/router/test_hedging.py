"""Second tries of captures, and a whole request's schedule."""

from dataclasses import replace

import pytest

from bench.cluster.instances import worker_view
from services.router.domain.assignment import ColdSegment
from services.router.domain.combine_choice import CombineWork
from services.router.domain.hedging import CaptureProgress, HedgePolicy, choose_hedge, choose_retry
from services.router.domain.schedule import schedule_request
from services.router.domain.workers import Role, TransferSpeed

SEGMENT = ColdSegment(b"key", 1000, 1_000_000)
POLICY = HedgePolicy(factor=2.0, slack_seconds=0.1)
WORKERS = [worker_view("a", 1e-4), worker_view("b", 1e-4), worker_view("c", 1e-3)]


def progress(elapsed: float, *tried: str) -> CaptureProgress:
    return CaptureProgress(SEGMENT, 0.1, elapsed, frozenset(tried))


def test_a_capture_is_hedged_once_and_only_when_it_is_late() -> None:
    combine = WORKERS[0]
    assert choose_hedge(progress(0.29, "a"), WORKERS, combine, POLICY) is None
    assert choose_hedge(progress(0.31, "a"), WORKERS, combine, POLICY) == "b"
    assert choose_hedge(progress(9.0, "a", "b"), WORKERS, combine, POLICY) is None


def test_only_a_free_worker_is_hedged_to() -> None:
    busy = [WORKERS[0], *(replace(each, backlog_seconds=0.01) for each in WORKERS[1:])]
    assert choose_hedge(progress(1.0, "a"), busy, WORKERS[0], POLICY) is None
    assert choose_hedge(progress(1.0, "a"), busy, WORKERS[0], replace(POLICY, free_seconds=0.01)) == "b"
    drains = [WORKERS[0], replace(WORKERS[1], is_draining=True), replace(WORKERS[2], roles=frozenset({Role.COMBINE}))]
    assert choose_hedge(progress(1.0, "a"), drains, WORKERS[0], POLICY) is None


def test_a_failed_capture_goes_to_the_soonest_other_worker_once() -> None:
    combine = WORKERS[0]
    assert choose_retry(SEGMENT, {"a"}, WORKERS, combine) == "b"
    assert choose_retry(SEGMENT, {"b"}, WORKERS, combine) == "a"
    busy = [WORKERS[0], replace(WORKERS[1], backlog_seconds=5.0), WORKERS[2]]
    assert choose_retry(SEGMENT, {"a"}, busy, combine) == "c"
    assert choose_retry(SEGMENT, {"a", "b"}, WORKERS, combine) is None
    assert choose_retry(SEGMENT, {"a"}, WORKERS[:1], combine) is None


def test_a_retry_counts_the_way_to_the_combine_worker() -> None:
    slow = TransferSpeed(0.0, 1_000_000 / 2)
    combine = replace(worker_view("z", 1e-3), speeds=replace(WORKERS[2].speeds, same_host=slow))
    assert choose_retry(SEGMENT, {"a"}, [*WORKERS[:2], combine], combine) == "z"


def test_a_request_is_combined_and_captured_by_one_view_of_the_workers() -> None:
    work = CombineWork((), 2, 50)
    workers = [replace(worker_view("a", 1e-5), backlog_seconds=0.5), worker_view("b", 1e-5)]
    cold = [ColdSegment(b"1", 2000), ColdSegment(b"2", 1000)]
    schedule = schedule_request(work, cold, workers)
    assert schedule is not None
    assert schedule.combine.worker_id == "b"
    assert {each.worker_id for each in schedule.captures.assignments} == {"b"}
    expected = schedule.captures.arrival_seconds + schedule.combine.combine_seconds
    assert schedule.first_token_seconds == pytest.approx(expected)
    assert schedule_request(work, cold, [replace(each, is_draining=True) for each in workers]) is None
    spread = schedule_request(work, cold, [worker_view("a", 1e-5), worker_view("b", 1e-5)])
    shared = schedule_request(work, cold, [worker_view("a", 1e-5), worker_view("b", 1e-5)], waiting=[2])
    assert spread is not None
    assert shared is not None
    assert len({each.worker_id for each in spread.captures.assignments}) == 2
    assert len({each.worker_id for each in shared.captures.assignments}) == 1
