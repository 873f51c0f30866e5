"""Arrivals by a schedule that does not wait for the router, over connections that are kept.

Written on bare sockets: the load must cost a fraction of what the router does, since both share the machine.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

from bench.prompts import make_prompt
from bench.router.stubs import MODEL_NAME

__all__ = ["Shape", "Timings", "make_requests", "run_open"]

_END = b"data: [DONE]\n\n"
_LAST_CHUNK = b"0\r\n\r\n"
_WITH_TEXT = b'"delta":{"content":"'
_DONE_SECONDS = 60.0
# Stands where every request has a number of its own.
_SERIAL = "XXXXXXXX"


@dataclass(frozen=True, slots=True)
class Shape:
    """libraries: sets of eight documents of about 400 tokens, one a request; orders: of each set's; tokens: of a reply."""

    libraries: int = 16
    tokens: int = 4
    orders: int = 4
    model: str = MODEL_NAME


@dataclass(slots=True)
class Timings:
    """Seconds from when each request was due until its first text, and until its end; what failed, by its first line."""

    first_token: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    elapsed_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Answered requests a second."""
        return len(self.whole) / self.elapsed_seconds


def make_requests(shape: Shape) -> list[bytes]:
    """Requests as they go over the wire, each to be sent with a number of its own: documents repeat, questions do not."""
    requests: list[bytes] = []
    for library in range(shape.libraries):
        prompt = make_prompt(seed=library)
        for number in range(shape.orders):
            turn = number % len(prompt.documents)
            documents = prompt.documents[turn:] + prompt.documents[:turn]
            question = f"{prompt.questions[number % len(prompt.questions)]} ({_SERIAL})"
            body = {
                "model": shape.model,
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": shape.tokens,
                "ignore_eos": True,
                "documents": [{"title": title, "text": text} for title, text in documents],
                "messages": [{"role": "system", "content": prompt.system}, {"role": "user", "content": question}],
            }
            requests.append(_post(json.dumps(body).encode()))
    return requests


def _post(body: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[bool] | None = None
        self.is_open = False
        self.received = bytearray()
        self.first_text_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        # uvloop's transports are no subclass.
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self.received += data
        if not self.first_text_at and _WITH_TEXT in data:
            self.first_text_at = time.perf_counter()
        if self.received.endswith(_LAST_CHUNK) or not self.received.startswith(b"HTTP/1.1 200"):
            self._settle()

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.is_open = False
        self._settle()

    async def exchange(self, request: bytes) -> bool:
        """Whether the reply is whole."""
        if self._transport is None:
            raise ConnectionError("the connection is not open")
        self.received.clear()
        self.first_text_at = 0.0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(_DONE_SECONDS):
            await self._done
        return _END in self.received and self.first_text_at > 0

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def _settle(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(True)


async def run_open(ports: Sequence[int], requests: Sequence[bytes], count: int, rate: float, seed: int) -> Timings:
    """`count` requests in turn at exponential intervals, `rate` a second; times count from when each was due.

    ports: of the routers, which requests go to by turns.
    """
    source, timings = random.Random(seed), Timings()
    idle: dict[int, list[_Connection]] = {port: [] for port in ports}
    loop = asyncio.get_running_loop()

    async def take(port: int) -> _Connection:
        while idle[port]:
            # A server closes what has been idle for long.
            if (kept := idle[port].pop()).is_open:
                return kept
        return (await loop.create_connection(_Connection, "127.0.0.1", port))[1]

    async def arrive(port: int, request: bytes, due: float) -> None:
        try:
            connection = await take(port)
            is_whole = await connection.exchange(request)
        except (OSError, TimeoutError) as error:
            timings.failures.append(repr(error))
            return
        if is_whole:
            timings.first_token.append(connection.first_text_at - due)
            timings.whole.append(time.perf_counter() - due)
        else:
            timings.failures.append(bytes(connection.received[:200]).decode(errors="replace"))
        if is_whole and connection.is_open:
            idle[port].append(connection)
        else:
            connection.close()

    started = due = time.perf_counter()
    async with asyncio.TaskGroup() as arrivals:
        for number in range(count):
            due += source.expovariate(rate)
            if (pause := due - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            request = requests[number % len(requests)].replace(_SERIAL.encode(), b"%08d" % (seed * 10**7 + number))
            arrivals.create_task(arrive(ports[number % len(ports)], request, due))
    timings.elapsed_seconds = time.perf_counter() - started
    for connection in chain.from_iterable(idle.values()):
        connection.close()
    return timings
