"""The open-loop sender: a task for every arrival, sent when it is due, whatever became of earlier ones."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from bench.traffic.client import Endpoint
from bench.traffic.connection import Connections, Exchange
from bench.traffic.record import Record, cut_record, read_record, unanswered

__all__ = ["Planned", "Sending", "encode", "send_open", "send_together"]

_PATH = "/v1/chat/completions"
_WATCH_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Planned:
    """Something to send `due` seconds from the start; body: as bytes, so that sending costs nothing but sending.

    path, method: a document that is forgotten in place of a request, whose body is empty.
    """

    due: float
    tenant: str
    body: bytes
    method: str = "POST"
    path: str = _PATH

    @property
    def is_request(self) -> bool:
        """Whether a reply is generated for it."""
        return self.path == _PATH


@dataclass(slots=True)
class Sending:
    """What is known while requests are under way: `records` of those that have ended, in no order; flying: what has come of the
    others, by when they were due.
    """

    records: list[Record] = field(default_factory=list)
    flying: dict[float, Exchange] = field(default_factory=dict)

    def late(self, promise: float, since: float, elapsed: float) -> int:
        """Requests due from `since` on that have broken a promise, `elapsed` seconds behind the start."""
        ended = sum(own.due >= since and (own.first_token is None or own.first_token > promise) for own in self.records)
        waiting = sum(due >= since and elapsed - due > promise and not own.has_text for due, own in self.flying.items())
        return ended + waiting


async def send_open(
    endpoint: Endpoint,
    planned: Sequence[Planned],
    patience: float,
    is_over: Callable[[Sending, float], bool],
) -> list[Record]:
    """Sends everything when it is due, then waits up to `patience` seconds for what is under way.

    is_over: asked about ten times a second with the seconds since the start; once it says so nothing more is sent, and what is
    under way is cut.
    """
    connections = Connections(endpoint.target)
    state = Sending()
    began = time.perf_counter() + 0.01
    tasks: set[asyncio.Task[None]] = set()

    async def arrive(item: Planned) -> None:
        lag = time.perf_counter() - began - item.due
        record = unanswered(item.tenant, item.due, lag=lag, is_cut=True)
        found = Exchange()
        if item.is_request:
            state.flying[item.due] = found
        try:
            await connections.exchange(item.method, item.path, item.body, endpoint.headers(item.tenant), found)
            record = read_record(item.tenant, item.due, began, found)
        except OSError as error:
            record = unanswered(item.tenant, item.due, repr(error), lag=lag)
        except asyncio.CancelledError:
            record = cut_record(item.tenant, item.due, began, found)
            raise
        finally:
            if item.is_request:
                del state.flying[item.due]
                state.records.append(record)

    async def send() -> None:
        for item in planned:
            if (pause := began + item.due - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            task = asyncio.create_task(arrive(item))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(set(tasks), timeout=patience)

    sending = asyncio.create_task(send())
    while not sending.done() and not is_over(state, time.perf_counter() - began):
        await asyncio.wait({sending}, timeout=_WATCH_SECONDS)
    await _end(sending, *tasks)
    connections.close()
    # What was not sent any more counts as little as what is under way and cut.
    known = {record.due for record in state.records}
    missed = [
        unanswered(own.tenant, own.due, is_cut=True) for own in planned if own.is_request and own.due not in known
    ]
    return sorted([*state.records, *missed], key=lambda record: record.due)


async def send_together(
    endpoint: Endpoint, bodies: Iterable[tuple[str, bytes]], concurrency: int, is_over: Callable[[], bool]
) -> list[Record]:
    """Tenants and bodies, so many at a time, until all are answered or `is_over`; for filling a cache, not for timing."""
    connections = Connections(endpoint.target)
    records: list[Record] = []
    waiting = iter(bodies)
    began = time.perf_counter()

    async def work() -> None:
        for tenant, body in waiting:
            if is_over():
                return
            due = time.perf_counter() - began
            try:
                found = Exchange()
                await connections.exchange("POST", _PATH, body, endpoint.headers(tenant), found)
                records.append(read_record(tenant, due, began, found))
            except OSError as error:
                records.append(unanswered(tenant, due, repr(error)))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    connections.close()
    return records


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


def encode(body: object) -> bytes:
    """JSON as it goes over the wire."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
