"""What becomes of sampled requests: one at a time, never for long, and nothing of them stays."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import pytest

from services.common.errors import InternalError, UnavailableError
from services.common.telemetry import current_request_id, set_request_id
from services.router.domain.explain import Explanation, PartExplanation, PlacingExplanation, Seconds, Usage
from services.router.domain.parts import PartKind
from services.router.domain.plan import Served
from services.router.domain.ports import FinishReason, Work, Workers
from services.router.domain.request import GenerationRequest, Namespace, Reuse, ReuseOptions, Sampling, TextPrompt
from services.router.domain.shown_tokens import ShownToken
from services.router.domain.workers import Role, WorkerView
from services.router.guard import GuardPolicy, ModelVersion, QualityGuard, SampleOutcome
from services.router.reply import Delta, Done, ReplyEvent
from services.router.shadows import QuietWorkers, ShadowPolicy, Shadows, ShadowSubject, TrafficWorkers, Way
from tests.unit.router.test_guard_records import Recorded
from tests.unit.router.test_shedding import view

VERSION = ModelVersion("m", "1", "p")
REQUEST = GenerationRequest(
    "m", TextPrompt(("a secret",)), Sampling(seed=3), ("stop",), ReuseOptions(), Namespace("acme")
)


class Pool:
    """Implements what is used of `Workers`."""

    def __init__(self, *views: WorkerView) -> None:
        self.shown = views
        self.occupied: list[Work] = []

    def views(self) -> tuple[WorkerView, ...]:
        return self.shown

    def occupy(self, worker_id: str, work: Work) -> AbstractContextManager[None]:
        assert worker_id
        self.occupied.append(work)
        return nullcontext()


def done(served: Served) -> Done:
    part = PartExplanation(PartKind.SEGMENT, "", "", 9, served, served, 1, 0, 8, "", None)
    seconds = Seconds(0, 0, 0, 0, 0, 0, 0)
    explanation = Explanation("compose", "parallel", (part,), seconds, PlacingExplanation("w", 0, 0, 0))
    return Done(FinishReason.LENGTH, Usage(9, 1, 8), explanation)


class Inner:
    """Answers on the one worker. waits: for ever; serves: how segments are."""

    def __init__(self, workers: QuietWorkers, serves: Served = Served.HIT, error: Exception | None = None) -> None:
        self.workers, self.serves, self.error = workers, serves, error
        self.asked: list[GenerationRequest] = []
        self.request_ids: list[str] = []
        self.release = asyncio.Event()
        self.release.set()
        self.running = self.most = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        self.asked.append(request)
        self.request_ids.append(current_request_id())
        if self.error:
            raise self.error
        with self.workers.occupy("w", Work(1.0)):
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self.release.wait()
                yield Delta("a", (ShownToken(b"a", -0.1, ((b"a", -0.1),), 0),))
                yield done(self.serves)
            finally:
                self.running -= 1


class Rig:
    """Shadows over one worker, quiet unless told otherwise."""

    def __init__(self, serves: Served = Served.HIT, error: Exception | None = None, patience: float = 20.0) -> None:
        self.pool, self.way, self.metrics = Pool(view()), Way(), Recorded()
        self.guard = QualityGuard(GuardPolicy(1.0, 0.25, {}, {}), self.metrics)
        self.guard.follow(VERSION)
        self.quiet = QuietWorkers(cast(Workers, self.pool), self.way, busy_requests=1)
        self.inner = Inner(self.quiet, serves, error)
        self.shadows = Shadows(self.inner.generate, self.quiet, self.guard, ShadowPolicy(1, 2, patience, 1))

    def add(self) -> None:
        self.shadows.add(ShadowSubject(REQUEST, "other", VERSION))

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110 # whatever it is
                await asyncio.sleep(0.01)


async def test_both_ways_are_asked_apart_from_the_request_and_compared() -> None:
    rig = Rig()
    set_request_id("the client's")
    rig.add()
    await rig.until(lambda: rig.metrics.outcomes)
    assert rig.metrics.outcomes == [SampleOutcome.COMPARED]
    composed, full = rig.inner.asked
    assert (composed.options.reuse, full.options.reuse) == (Reuse.COMPOSE, Reuse.OFF)
    for asked in (composed, full):
        assert asked.prompt == REQUEST.prompt
        assert asked.namespace == REQUEST.namespace
        assert (asked.stop, asked.sampling.seed, asked.sampling.temperature) == ((), None, 0.0)
    assert rig.inner.request_ids == ["", ""]
    # Whoever comes need not wait for it.
    assert [work.seconds for work in rig.pool.occupied] == [0.0, 0.0]


async def test_one_runs_at_a_time_few_wait_and_the_rest_is_dropped() -> None:
    rig = Rig()
    rig.inner.release.clear()
    for _ in range(5):
        rig.add()
    assert rig.metrics.outcomes == [SampleOutcome.FULL] * 2
    await rig.until(lambda: rig.inner.running)
    rig.inner.release.set()
    await rig.until(lambda: len(rig.metrics.outcomes) == 5)
    assert rig.inner.most == 1
    assert rig.metrics.outcomes[2:] == [SampleOutcome.COMPARED] * 3


async def test_a_comparison_that_fails_keeps_nothing_of_its_request() -> None:
    """Not even until the collector comes."""
    rig = Rig()
    text = "what only this test asks"

    async def fail(_request: GenerationRequest) -> AsyncGenerator[ReplyEvent]:
        raise InternalError("broken")
        yield Delta("")

    shadows = Shadows(fail, rig.quiet, rig.guard, ShadowPolicy(1, 2, 20.0, 1))
    gc.collect()
    gc.disable()
    try:
        shadows.add(ShadowSubject(replace(REQUEST, prompt=TextPrompt((text,))), "other", VERSION))
        await rig.until(lambda: rig.metrics.outcomes)
        await rig.until(
            lambda: not [each for each in gc.get_objects() if type(each) is TextPrompt and text in each.pieces]
        )
    finally:
        gc.enable()
    assert rig.metrics.outcomes == [SampleOutcome.FAILED]


@pytest.mark.parametrize(
    "busy", [{"running_requests": 2}, {"backlog_seconds": 0.1}, {"roles": frozenset({Role.PREFILL})}]
)
async def test_where_no_worker_is_quiet_nothing_is_asked(busy: dict[str, object]) -> None:
    rig = Rig(patience=0.3)
    rig.pool.shown = (replace(view(), **busy),)  # type: ignore[arg-type] # some fields of a view
    rig.add()
    await rig.until(lambda: rig.metrics.outcomes)
    assert rig.metrics.outcomes == [SampleOutcome.BUSY]
    assert rig.inner.asked == []


async def test_traffic_stops_it_on_its_worker_alone() -> None:
    rig = Rig()
    rig.inner.release.clear()
    rig.add()
    await rig.until(lambda: rig.inner.running)
    traffic = TrafficWorkers(cast(Workers, rig.pool), rig.way)
    with traffic.occupy("another", Work(1.0)):
        await asyncio.sleep(0)
        assert rig.inner.running == 1
    with traffic.occupy("w", Work(1.0)):
        await rig.until(lambda: rig.inner.running == 0)
    rig.inner.release.set()
    await rig.until(lambda: rig.metrics.outcomes)
    assert rig.metrics.outcomes == [SampleOutcome.COMPARED]
    assert len(rig.inner.asked) == 3


async def test_what_is_not_composed_any_more_says_nothing() -> None:
    rig = Rig(serves=Served.LIVE)
    rig.add()
    await rig.until(lambda: rig.metrics.outcomes)
    assert rig.metrics.outcomes == [SampleOutcome.NOT_COMPOSED]
    assert len(rig.inner.asked) == 1


async def test_a_failure_is_counted_and_nobody_hears_of_it() -> None:
    rig = Rig(error=InternalError("a fault"))
    rig.add()
    await rig.until(lambda: rig.metrics.outcomes)
    assert rig.metrics.outcomes == [SampleOutcome.FAILED]


async def test_a_worker_that_traffic_took_first_is_waited_for() -> None:
    rig = Rig(error=UnavailableError("no worker takes prompts now"), patience=0.5)
    rig.add()
    await rig.until(lambda: rig.metrics.outcomes)
    assert rig.metrics.outcomes == [SampleOutcome.BUSY]
    assert len(rig.inner.asked) > 1


async def test_the_end_of_the_router_ends_it() -> None:
    rig = Rig()
    rig.inner.release.clear()
    rig.add()
    rig.add()
    await rig.until(lambda: rig.inner.running)
    await rig.shadows.close()
    assert rig.inner.running == 0
    assert rig.metrics.outcomes == []
