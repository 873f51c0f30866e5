"""Discrete events: requests arrive, sweeps end, states travel, prompts become ready. Scheduling is the router's own."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from services.cache.domain.eviction import Policy, least_recently_used
from services.router.domain.assignment import ColdSegment
from services.router.domain.combine_choice import CombineWork, Holding, StoredState
from services.router.domain.schedule import Schedule, schedule_request
from services.simulator.clock import Clock
from services.simulator.costs import Costs
from services.simulator.residency import Residency
from services.simulator.sweeps import join, ready_at
from services.simulator.ways import Window, transfer
from services.simulator.worker import Prompt, Worker
from services.simulator.workload import Arrival

__all__ = ["Counts", "FanOut", "Order", "Run", "Served", "Setting", "simulate"]

_PROGRESS_REQUESTS = 100


class Order(StrEnum):
    """How cold segments are assigned: by the router's scheduling, or in turn, whatever their length."""

    LONGEST_FIRST = "longest-first"
    ROUND_ROBIN = "round-robin"


class FanOut(StrEnum):
    """On how many workers a request captures while others wait: on its share (`fan_out`), or on as many as it can use."""

    SHARED = "shared"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run simulates. room_bytes: of each worker's states, None without bound."""

    num_workers: int
    order: Order = Order.LONGEST_FIRST
    fan_out: FanOut = FanOut.SHARED
    is_pipelined: bool = True
    policy: Policy = least_recently_used
    room_bytes: int | None = None


@dataclass(slots=True)
class Served:
    """A request that came at `time`. alone_seconds: to its first token on idle workers with the same hits, where captures are
    spread as evenly as may be and the combine follows them.
    """

    time: float
    alone_seconds: float
    first_token_seconds: float = 0.0


@dataclass(slots=True)
class Counts:
    """Tokens of segments: there, being captured for another request, or captured for this one; and captures, evictions."""

    hit_tokens: int = 0
    pending_tokens: int = 0
    cold_tokens: int = 0
    captures: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What has happened. end: of the last sweep, from the first arrival; busy_seconds: of each worker."""

    served: list[Served]
    counts: Counts
    end: float
    busy_seconds: list[float]


@dataclass(slots=True)
class _Flight:
    """A request between arrival and first token. pinned: states that its worker keeps for it."""

    served: Served
    prompt: Prompt
    worker: Worker
    pinned: list[bytes] = field(default_factory=list)


def simulate(
    arrivals: Iterable[Arrival], costs: Costs, setting: Setting, on_progress: Callable[[int], None] | None = None
) -> Run:
    """Run to the end. The same arrivals and setting give the same run. `on_progress` learns how many have arrived."""
    cluster = _Cluster(costs, setting)
    for number, arrival in enumerate(arrivals, 1):
        cluster.run_until(arrival.time)
        cluster.accept(arrival)
        if on_progress and number % _PROGRESS_REQUESTS == 0:
            on_progress(number)
    cluster.run_until(None)
    return cluster.result()


class _Cluster:
    """Virtual workers and what goes on between them."""

    def __init__(self, costs: Costs, setting: Setting) -> None:
        self._costs, self._setting = costs, setting
        self._curve = costs.capture.curve
        speeds = costs.speeds(setting.is_pipelined)
        names = [f"worker-{index:03}" for index in range(setting.num_workers)]
        hosts = [f"host-{index // costs.workers_per_host}" for index in range(setting.num_workers)]
        self._workers = {name: Worker(name, host, costs, speeds) for name, host in zip(names, hosts, strict=True)}
        self._residency = Residency(names, setting.policy, setting.room_bytes)
        self._turns = itertools.cycle(names)
        self._clock = Clock()
        self._served: list[Served] = []
        self._counts = Counts()
        # By key, who waits for captures whose end is not known yet.
        self._waiting: defaultdict[bytes, list[_Flight]] = defaultdict(list)
        self._flights: dict[int, _Flight] = {}
        # By key, whose captures have not ended, and of each of these requests, how many.
        self._owners: defaultdict[bytes, list[int]] = defaultdict(list)
        self._capturing: dict[int, int] = {}
        # Workers that something has happened to.
        self._touched: dict[str, Worker] = {}

    def run_until(self, time: float | None) -> None:
        """Let everything happen before `time`, or all that is left."""
        while self._clock.advance(time):
            # Those that only capture go first: prompts beside captures then know when the others' states come.
            for worker in sorted(self._touched.values(), key=lambda worker: (bool(worker.prompts), worker.worker_id)):
                self._begin_sweep(worker)
            self._touched.clear()

    def accept(self, arrival: Arrival) -> None:
        """A request arrives now."""
        stored = [segment for segment in arrival.segments if self._residency.holders(segment.key)]
        there = {segment.key for segment in stored}
        pending = [one for one in arrival.segments if one.key in self._waiting and one.key not in there]
        cold = [one for one in arrival.segments if one.key not in self._waiting and one.key not in there]
        work = CombineWork(tuple(map(self._stored_state, stored)), arrival.num_composed, arrival.live_tokens)
        views = [worker.view(self._clock.now) for worker in self._workers.values()]
        waiting = tuple(self._capturing.values()) if self._setting.fan_out is FanOut.SHARED else ()
        schedule = schedule_request(work, cold, views, waiting)
        if schedule is None:
            raise RuntimeError("every virtual worker combines")
        computed = [segment for segment in stored if segment.key in schedule.combine.computed]
        hits = [segment for segment in stored if segment.key not in schedule.combine.computed]
        self._count(hits, pending, cold)
        flight = self._take(schedule, arrival.live_tokens + _num_tokens(computed), cold)
        for segment in (*pending, *cold):
            flight.prompt.outstanding.add(segment.key)
            self._waiting[segment.key].append(flight)
        for segment in cold:
            self._owners[segment.key].append(flight.prompt.index)
            self._capturing[flight.prompt.index] = len(cold)
        self._fetch(flight, schedule, hits)
        for segment, name in self._placements(schedule, cold):
            self._workers[name].order(segment)
            self._touch(self._workers[name])
        self._settle(flight)

    def result(self) -> Run:
        """Behind the last event, when nothing is left on its way."""
        self._residency.check_integrity()
        if self._flights or self._waiting or self._owners or self._capturing:
            raise AssertionError("requests are left that nothing will serve")
        self._counts.evictions = self._residency.evictions
        busy = [worker.busy_seconds for worker in self._workers.values()]
        return Run(self._served, self._counts, self._clock.now, busy)

    def _stored_state(self, segment: ColdSegment) -> StoredState:
        holdings = tuple(Holding(name) for name in self._residency.holders(segment.key))
        return StoredState(segment.key, segment.num_tokens, segment.num_bytes, holdings)

    def _count(self, hits: list[ColdSegment], pending: list[ColdSegment], cold: list[ColdSegment]) -> None:
        self._counts.hit_tokens += _num_tokens(hits)
        self._counts.pending_tokens += _num_tokens(pending)
        self._counts.cold_tokens += _num_tokens(cold)
        self._counts.captures += len(cold)

    def _take(self, schedule: Schedule, live_tokens: int, cold: list[ColdSegment]) -> _Flight:
        """The request's place on its combine worker."""
        worker = self._workers[schedule.combine.worker_id]
        seconds = schedule.combine.combine_seconds
        prompt = Prompt(len(self._served), seconds - self._costs.combine.pass_seconds, live_tokens)
        served = Served(self._clock.now, self._alone_seconds(cold) + seconds)
        self._served.append(served)
        flight = _Flight(served, prompt, worker)
        self._flights[prompt.index] = flight
        worker.accept(prompt)
        return flight

    def _alone_seconds(self, cold: list[ColdSegment]) -> float:
        """Of captures: of the longest one, or of all of them spread evenly over the workers."""
        each = [self._costs.capture_seconds(segment.num_tokens) for segment in cold]
        return max(max(each), sum(each) / len(self._workers)) if each else 0.0

    def _placements(self, schedule: Schedule, cold: list[ColdSegment]) -> Iterator[tuple[ColdSegment, str]]:
        if self._setting.order is Order.ROUND_ROBIN:
            return zip(cold, self._turns, strict=False)
        return ((each.segment, each.worker_id) for each in schedule.captures.assignments)

    def _fetch(self, flight: _Flight, schedule: Schedule, hits: list[ColdSegment]) -> None:
        """Hits become the prompt's: what lies at its worker at once, the rest when it has come."""
        by_key = {segment.key: segment for segment in hits}
        sources = {fetch.key: self._workers[fetch.holding.worker_id] for fetch in schedule.combine.fetches}
        now = self._clock.now
        for key in by_key:
            if key in sources:
                self._residency.rooms[sources[key].worker_id].use(key, now)
            else:
                self._residency.rooms[flight.worker.worker_id].use(key, now)
                self._learn(flight, flight.worker, by_key[key])
        for key, source in sources.items():
            self._learn(flight, source, by_key[key])

    def _learn(self, flight: _Flight, source: Worker, segment: ColdSegment) -> None:
        """The prompt's worker has the state from `source`, or is to have it; the prompt keeps it until its first token."""
        target = flight.worker
        room = self._residency.rooms[target.worker_id]
        if segment.key not in room.held:
            since = self._residency.rooms[source.worker_id].held[segment.key].since
            computed = Window(max(since.first, self._clock.now), max(since.last, self._clock.now))
            way = target.speeds.same_host if target.host == source.host else target.speeds.other_host
            arrival = transfer(source.link, target.link, way, computed, segment.num_bytes)
            self._residency.put(target.worker_id, segment, arrival, self._clock.now)
        room.pin(segment.key)
        flight.pinned.append(segment.key)
        flight.prompt.learn(segment.key, room.held[segment.key].since)

    def _settle(self, flight: _Flight) -> None:
        """Once it is known when every state is there, so is when the combine may begin."""
        if not flight.prompt.outstanding:
            begin = max(self._clock.now, ready_at(flight.prompt, self._costs))
            self._clock.at(begin, lambda: self._line_up(flight))

    def _line_up(self, flight: _Flight) -> None:
        flight.worker.ready.append(flight.prompt)
        self._touch(flight.worker)

    def _touch(self, worker: Worker) -> None:
        self._touched[worker.worker_id] = worker
        self._clock.at(self._clock.now, _nothing)

    def _begin_sweep(self, worker: Worker) -> None:
        """Ready prompts first, else the next pass of captures."""
        if worker.is_busy or not worker.has_work:
            return
        now, complete = self._clock.now, list[ColdSegment]()
        if worker.ready:
            prompts = worker.take_prompts()
            until = now + worker.combine_seconds(prompts)
        else:
            seconds, complete = worker.take_pass(self._curve)
            joined = join(worker, complete, now, seconds)
            prompts, until = joined.prompts, joined.until
            self._announce(worker, complete, Window(now + (until - now) / self._costs.layers, until), prompts)
        worker.begin(now, until)
        self._clock.at(until, lambda: self._end_sweep(worker, complete, prompts))

    def _announce(self, worker: Worker, complete: list[ColdSegment], window: Window, sharing: list[Prompt]) -> None:
        """It is known when these states are there; who waits for them reads along. `sharing` prompts are in the sweep."""
        indices = {prompt.index for prompt in sharing}
        for segment in complete:
            self._residency.put(worker.worker_id, segment, window, self._clock.now)
            for flight in self._waiting.pop(segment.key, []):
                self._learn(flight, worker, segment)
                if flight.prompt.index not in indices:
                    self._settle(flight)

    def _end_sweep(self, worker: Worker, complete: list[ColdSegment], prompts: list[Prompt]) -> None:
        worker.finish(prompts)
        for segment in complete:
            owner = self._owners[segment.key].pop(0)
            if not self._owners[segment.key]:
                del self._owners[segment.key]
            self._capturing[owner] -= 1
            if not self._capturing[owner]:
                del self._capturing[owner]
        for prompt in prompts:
            flight = self._flights.pop(prompt.index)
            flight.served.first_token_seconds = self._clock.now - flight.served.time
            for key in flight.pinned:
                self._residency.rooms[worker.worker_id].release(key)
        self._touch(worker)


def _num_tokens(segments: Iterable[ColdSegment]) -> int:
    return sum(segment.num_tokens for segment in segments)


def _nothing() -> None:
    """Only the present moment."""
