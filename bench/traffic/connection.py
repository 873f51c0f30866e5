"""HTTP/1.1 on bare connections: what arrives is only noted with its time, and read when the reply has ended.

A load that shares the machine with what it measures, or has to keep up with thousands of tokens a second, must cost little.
"""

import asyncio
import re
import ssl
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

__all__ = ["Connections", "Exchange", "Target"]

_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
# The first piece of a reply's text, in a chat or in a completion.
_TEXT = re.compile(rb'"(?:content|text)":"[^"]')


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server listens.

    Raises:
        ValueError: the URL is none of http or https.
    """

    url: str

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise ValueError(f"{self.url!r} must be http://host:port or https://host:port")

    @property
    def host(self) -> str:
        """Name or address."""
        return str(urlsplit(self.url).hostname)

    @property
    def port(self) -> int:
        """Its own, or the scheme's."""
        return urlsplit(self.url).port or (443 if self.is_encrypted else 80)

    @property
    def is_encrypted(self) -> bool:
        """Whether the scheme is https."""
        return urlsplit(self.url).scheme == "https"


@dataclass(slots=True)
class Exchange:
    """A reply as its bytes arrived; times by `time.perf_counter`. sent_at: when the request was handed over; has_text: it has
    begun to answer.
    """

    sent_at: float = 0.0
    ended_at: float = 0.0
    has_text: bool = False
    received: bytearray = field(default_factory=bytearray)
    # Bytes that had arrived, and when.
    _lengths: list[int] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)

    def add(self, data: bytes) -> None:
        """More has arrived."""
        self.received += data
        self.has_text = self.has_text or _TEXT.search(data) is not None
        self._lengths.append(len(self.received))
        self._times.append(time.perf_counter())

    @property
    def is_whole(self) -> bool:
        """Whether nothing more is to come."""
        _, separator, body = bytes(self.received).partition(_HEAD_END)
        if not separator:
            return False
        length = self.header("content-length")
        if length is not None:
            return len(body) >= int(length)
        return body.endswith(_LAST_CHUNK)

    @property
    def status(self) -> int:
        """Of the reply; 0 where there is none."""
        words = bytes(self.received[:64]).split(b" ", 2)
        return int(words[1]) if len(words) > 1 and words[1][:3].isdigit() else 0

    def header(self, name: str) -> str | None:
        """A header's value."""
        head = bytes(self.received).partition(_HEAD_END)[0].decode("latin-1")
        for line in head.split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.strip().lower() == name:
                return value.strip()
        return None

    def time_of(self, position: int) -> float:
        """When the byte at a position of `received` had arrived."""
        return self._times[min(bisect_right(self._lengths, position), len(self._times) - 1)]


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._exchange: Exchange | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        # uvloop's transports are no subclass.
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._exchange is None:
            return
        self._exchange.add(data)
        # A length stands in the heads of short replies; a stream's pieces are not looked at before the last one.
        is_short = b"\r\ncontent-length" in self._exchange.received[:2048].lower()
        if (is_short or data.endswith(_LAST_CHUNK)) and self._exchange.is_whole:
            self._settle()

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.is_open = False
        self._settle()

    @property
    def is_free(self) -> bool:
        """Another exchange may begin."""
        return self.is_open and self._exchange is None

    async def exchange(self, request: bytes, found: Exchange) -> None:
        """Send it and wait for the end of the reply, or of the connection."""
        if self._transport is None:
            raise ConnectionError("the connection is not open")
        self._exchange = found
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        found.sent_at = time.perf_counter()
        await self._done
        found.ended_at = time.perf_counter()
        self._exchange = None

    def close(self) -> None:
        """End the connection; the server gives up what runs for it."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _settle(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Connections:
    """Kept connections to one server, as many as are in use at once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[_Connection] = []

    async def exchange(self, method: str, path: str, body: bytes, headers: Mapping[str, str], found: Exchange) -> None:
        """One request and its reply, whole or as far as the server sent it, into `found` as it comes.

        Raises:
            OSError: the server is not reached, or ended the connection before it sent anything.
        """
        request = _request(method, path, self._target, body, headers)
        connection = await self._take()
        try:
            await connection.exchange(request, found)
        finally:
            # One that is cancelled, or was cut off, is of no more use.
            if connection.is_free:
                self._idle.append(connection)
            else:
                connection.close()
        if not found.received:
            raise ConnectionError("the server ended the connection without a reply")

    def close(self) -> None:
        """End all that are idle."""
        while self._idle:
            self._idle.pop().close()

    async def _take(self) -> _Connection:
        while self._idle:
            # A server closes what has been idle for long.
            if (kept := self._idle.pop()).is_open:
                return kept
        context = ssl.create_default_context() if self._target.is_encrypted else None
        loop = asyncio.get_running_loop()
        made = await loop.create_connection(_Connection, self._target.host, self._target.port, ssl=context)
        return made[1]


def _request(method: str, path: str, target: Target, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {target.host}:{target.port}", f"content-length: {len(body)}"]
    lines += ["content-type: application/json", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + _HEAD_END + body
