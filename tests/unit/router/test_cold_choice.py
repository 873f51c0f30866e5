"""`cold: auto` against exhaustion over combine workers and assignments, and what it must answer at the extremes."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.cluster.instances import COMBINE, Instance, worker_view
from services.router.domain.assignment import ColdSegment
from services.router.domain.cold_choice import ColdChoice, ColdReason, choose_cold
from services.router.domain.combine_choice import CombineWork
from services.router.domain.request import Cold
from services.router.domain.schedule import Schedule, schedule_request
from services.router.domain.workers import Role, WorkerView

SEAM, QUESTION = 8, 60


def segments(lengths: Sequence[int]) -> tuple[ColdSegment, ...]:
    return tuple(ColdSegment(bytes([index]), length) for index, length in enumerate(lengths))


def schedules(lengths: Sequence[int], workers: Sequence[WorkerView]) -> tuple[Schedule, Schedule]:
    composed = CombineWork((), len(lengths), QUESTION + SEAM * len(lengths))
    parallel = schedule_request(composed, segments(lengths), workers)
    live = schedule_request(CombineWork((), 0, QUESTION + sum(lengths)), (), workers)
    assert parallel is not None
    assert live is not None
    return parallel, live


def choose(lengths: Sequence[int], workers: Sequence[WorkerView]) -> ColdChoice:
    return choose_cold(*schedules(lengths, workers), workers)


def cost_by_exhaustion(lengths: Sequence[int], workers: Sequence[WorkerView], is_live: bool) -> float:
    """Of the worker with the soonest first token, its captures in the best of all assignments."""
    live_tokens = QUESTION + (sum(lengths) if is_live else SEAM * len(lengths))
    found = []
    for worker in workers:
        speed = worker.speeds.combine
        combining = speed.pass_seconds + live_tokens * speed.token_seconds
        combining += 0 if is_live else len(lengths) * speed.segment_seconds
        combining += worker.running_requests * speed.running_seconds
        found.append((worker.backlog_seconds + combining, worker.running_requests, worker.worker_id, combining))
    first_token, running, worker_id, combining = min(found)
    if not is_live:
        ordered = sorted(workers, key=lambda one: one.worker_id != worker_id)
        captured = Instance(segments(lengths), tuple(ordered)).optimum()
        first_token = max(first_token, captured + combining)
    return first_token + (1 + running) * combining


def drawn(generator: random.Random) -> tuple[list[int], list[WorkerView]]:
    workers = []
    for index in range(generator.choice((1, 1, 2, 3))):
        view = worker_view(f"w{index}", generator.uniform(1e-5, 6e-5), generator.choice((0.0, 0.02)))
        speeds = replace(view.speeds, combine=replace(COMBINE, running_seconds=generator.choice((0.0, 0.002))))
        backlog = generator.choice((0.0, generator.uniform(0, 0.3)))
        running = generator.choice((0, 0, 1, 6))
        workers.append(replace(view, speeds=speeds, backlog_seconds=backlog, running_requests=running))
    return [generator.randint(20, 4000) for _ in range(generator.randint(1, 6))], workers


def test_the_choice_is_that_of_exhaustion() -> None:
    generator = random.Random(3)
    chosen: list[Cold] = []
    for _ in range(300):
        lengths, workers = drawn(generator)
        parallel, live = (cost_by_exhaustion(lengths, workers, way) for way in (False, True))
        choice = choose(lengths, workers)
        assert choice.live_seconds == pytest.approx(live)
        # Captures are assigned longest first, within a third of the best.
        assert choice.parallel_seconds is not None
        assert parallel * (1 - 1e-9) <= choice.parallel_seconds <= parallel * 4 / 3
        if abs(parallel - live) > 0.1 * live:
            assert choice.chosen is (Cold.LIVE if live < parallel else Cold.PARALLEL)
        chosen.append(choice.chosen)
    assert min(chosen.count(Cold.LIVE), chosen.count(Cold.PARALLEL)) > 30


def test_short_prompts_are_live_and_long_ones_parallel() -> None:
    idle = [worker_view("a", 20e-6, 0.02)]
    assert choose([200], idle).chosen is Cold.LIVE
    assert choose([9000] * 4, idle).chosen is Cold.PARALLEL
    chosen = [choose([length], idle).chosen for length in range(50, 9000, 50)]
    assert chosen == sorted(chosen, key=(Cold.LIVE, Cold.PARALLEL).index)


def test_load_turns_live_into_parallel_and_never_back() -> None:
    idle = worker_view("a", 20e-6, 0.02)
    chosen = [choose([800], [replace(idle, running_requests=running)]).chosen for running in range(30)]
    assert chosen[0] is Cold.LIVE
    assert chosen[-1] is Cold.PARALLEL
    assert chosen == sorted(chosen, key=(Cold.LIVE, Cold.PARALLEL).index)


def test_without_a_worker_that_captures_the_plan_stays_as_it_is() -> None:
    combining = [replace(worker_view("a", 20e-6), roles=frozenset({Role.COMBINE}))]
    assert choose([200], combining) == ColdChoice(Cold.PARALLEL, ColdReason.NO_PREFILL_WORKER)
