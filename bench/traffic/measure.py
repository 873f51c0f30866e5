"""One workload in one mode against a running stack: forget, fill the cache, then level after level until the rates are known."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from bench.traffic.bodies import Mode, Writer, body_of
from bench.traffic.client import Endpoint, forget
from bench.traffic.levels import Level, lead_seconds, summarise
from bench.traffic.record import Record
from bench.traffic.scrape import COUNTERS, GaugeWatch, difference, scrape
from bench.traffic.search import Bracket, RateSearch
from bench.traffic.sender import Planned, Sending, encode, send_open, send_together
from bench.traffic.stream import Removal, TrafficRequest, TrafficStream
from bench.traffic.workload import Workload

__all__ = ["Cell", "CellResult", "Say", "Settings", "measure_cell", "plan_events"]

Say = Callable[[str], None]
# What is under way when a level's arrivals end has so long to come to its end.
_PATIENCE_SECONDS = 20.0
# Of a cell's time, that filling the cache may take.
_FILL_SHARE = 0.35
# A full cache answers at most so many times as fast as one that fills, for the first rate that is tried.
_FULLER = 3.0
# Of a level's requests, that have broken a promise for good: fewer may be a tail, and their times are worth knowing.
_HOPELESS_SHARE = 0.25
# Requests that a level should have, however low its rate is.
_LEAST_COUNTED = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """promises: seconds to the first token; level_seconds: of one level's arrivals; fill_requests: sent ahead of the first
    level, `fill_concurrency` at a time; settle_seconds: of a level ahead of the first that does not count, since a device
    compiles what it meets first.
    """

    promises: tuple[float, ...]
    level_seconds: float
    fill_requests: int
    fill_concurrency: int = 4
    settle_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured. salt: of everything that is stored for it, so that cells share nothing."""

    workload: Workload
    mode: Mode
    model: str
    salt: str


@dataclass(slots=True)
class CellResult:
    """brackets: of the promises; filled: requests that filled the cache, in fill_seconds; forgotten_bytes: of what earlier
    cells had stored; start_rate: the first that is tried; records: by level.
    """

    cell: Cell
    brackets: list[Bracket] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    records: list[list[Record]] = field(default_factory=list)
    filled: int = 0
    start_rate: float = 0.0
    fill_seconds: float = 0.0
    forgotten_bytes: int = 0
    ended: str = "all rates are known"


async def measure_cell(
    endpoint: Endpoint, result: CellResult, writer: Writer, settings: Settings, deadline: float, say: Say
) -> None:
    """Into `result`, level by level, until a deadline of `time.perf_counter`.

    Raises:
        TrafficError: the stack does not forget.
    """
    cell = result.cell
    tenants = [f"tenant-{index}" for index in range(cell.workload.tenants.count)]
    result.forgotten_bytes = await asyncio.to_thread(forget, endpoint, tenants)
    stream = TrafficStream(cell.workload)
    result.start_rate = start = await _fill(endpoint, result, stream, writer, settings, deadline, say)
    say(f"  filled with {result.filled} requests in {result.fill_seconds:.1f} s")
    search = RateSearch(settings.promises, start)
    if settings.settle_seconds:
        events = stream.draw(start, settings.settle_seconds)
        await measure_level(endpoint, cell, writer, (start, settings.settle_seconds), events, _Watch(search, deadline))
    while (rate := search.next_rate()) is not None:
        left = deadline - time.perf_counter()
        if left < 0.5 * settings.level_seconds:
            result.ended = "the time was up"
            break
        seconds = min(max(settings.level_seconds, _LEAST_COUNTED / rate), left)
        events = stream.draw(rate, seconds)
        watch, shape = _Watch(search, deadline), (rate, seconds)
        level, records = await measure_level(endpoint, cell, writer, shape, events, watch)
        if time.perf_counter() > deadline and level.cut:
            result.ended = "the time was up within a level, which is left out"
            break
        search.add(level)
        result.records.append(records)
        result.levels, result.brackets = search.levels, search.brackets
        say(f"  {_line(level)}")


@dataclass(frozen=True, slots=True)
class _Watch:
    """What ends a level early: a deadline, or that none of the open promises can be kept any more."""

    search: RateSearch
    deadline: float

    def is_over(self, state: Sending, elapsed: float, counted: int, since: float) -> bool:
        """See `send_open`."""
        if time.perf_counter() > self.deadline:
            return True
        promises = [own.promise for own in self.search.brackets if not own.is_closed]
        return bool(promises) and state.late(max(promises), since, elapsed) > max(1.0, _HOPELESS_SHARE * counted)


async def measure_level(
    endpoint: Endpoint,
    cell: Cell,
    writer: Writer,
    level: tuple[float, float],
    events: Sequence[TrafficRequest | Removal],
    watch: _Watch,
) -> tuple[Level, list[Record]]:
    """level: its rate and seconds. Bodies are made ahead of the first arrival."""
    rate, seconds = level
    planned = list(plan_events(events, cell, writer))
    since = lead_seconds(seconds)
    counted = sum(own.is_request and own.due >= since for own in planned)
    before = await asyncio.to_thread(scrape, endpoint.metrics)
    gauges = GaugeWatch(endpoint.metrics)
    watching = asyncio.create_task(gauges.run())
    records = await send_open(
        endpoint, planned, _PATIENCE_SECONDS, lambda state, elapsed: watch.is_over(state, elapsed, counted, since)
    )
    watching.cancel()
    behind = await asyncio.to_thread(scrape, endpoint.metrics)
    metrics = {
        **difference(before, behind, COUNTERS),
        **gauges.means(),
        **{f"most_{name}": value for name, value in gauges.most(("state_bytes", "page_share", "waiting")).items()},
    }
    return summarise(records, rate, seconds, watch.search.promises, metrics), records


def plan_events(events: Iterable[TrafficRequest | Removal], cell: Cell, writer: Writer) -> Iterable[Planned]:
    """Requests, and documents to be forgotten, which an exact cache has to hear of as well."""
    for event in events:
        if isinstance(event, TrafficRequest):
            body = encode(body_of(event, cell.mode, writer, cell.model, cell.salt))
            yield Planned(event.at, event.tenant, body)
        elif cell.mode is not Mode.OFF:
            yield Planned(event.at, event.tenant, b"", "DELETE", f"/v1/documents/{quote(event.name, safe='')}")


async def _fill(
    endpoint: Endpoint,
    result: CellResult,
    stream: TrafficStream,
    writer: Writer,
    settings: Settings,
    deadline: float,
    say: Say,
) -> float:
    """Returns the rate to begin with: half of what was answered a second while it filled, which is more the fuller it was."""
    cell, began = result.cell, time.perf_counter()
    until = began + _FILL_SHARE * max(deadline - began, 0.0)
    # Nothing is stored without reuse: a few requests compile what a device has to compile.
    count = 2 * settings.fill_concurrency if cell.mode is Mode.OFF else settings.fill_requests
    bodies = (
        (own.tenant, encode(body_of(own, cell.mode, writer, cell.model, cell.salt))) for own in stream.take(count)
    )
    records = await send_together(endpoint, bodies, settings.fill_concurrency, lambda: time.perf_counter() > until)
    ends = sorted(own.due + own.end for own in records if own.is_answered and own.end is not None)
    result.filled, result.fill_seconds = len(ends), time.perf_counter() - began
    if missing := len(records) - len(ends):
        faults = ", ".join(sorted({own.fault or f"status {own.status}" for own in records if not own.is_answered}))
        say(f"  {missing} requests of the fill were not answered: {faults[:300]}")
    if not ends:
        return 1.0
    middle = ends[len(ends) // 2]
    later = (len(ends) - len(ends) // 2 - 1) / max(ends[-1] - middle, 1e-3)
    # Replies of a few that end together say little.
    return 0.5 * min(later, _FULLER * len(ends) / ends[-1]) if later else 0.5 * len(ends) / ends[-1]


def _line(level: Level) -> str:
    tokens = sum(level.tokens.values()) or 1
    hits = (level.tokens["hit"] + level.tokens["prefix"]) / tokens
    marks = "  SENDER BEHIND" if level.behind else ""
    cut = f", {level.cut} cut" if level.cut else ""
    return (
        f"{level.rate:7.3f}/s: {level.counted} counted, first token p50 {level.first_token_p50:.3f} p95"
        f" {level.first_token_p95:.3f} s, reused {hits:.0%}, {level.refused} refused, {level.failed} failed{cut}{marks}"
    )
