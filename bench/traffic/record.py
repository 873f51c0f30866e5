"""What became of one request, read out of its reply."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from bench.traffic.connection import Exchange

__all__ = ["Record", "ServedTokens", "cut_record", "read_record", "unanswered"]


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """Prompt tokens by how they were served: prefix and hit were not computed, cold were captured for this request."""

    prefix: int = 0
    hit: int = 0
    cold: int = 0
    live: int = 0

    @property
    def total(self) -> int:
        """The prompt."""
        return self.prefix + self.hit + self.cold + self.live


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Seconds count from when it was due: lag until it was sent, first_token, end.

    gaps: seconds between pieces of the reply, `pieces` of them; status: of HTTP, 0 without a reply; fault: what the server or
    the connection said; is_cut: given up by the sender.
    """

    tenant: str
    due: float
    lag: float = 0.0
    status: int = 0
    first_token: float | None = None
    end: float | None = None
    gaps: tuple[float, ...] = ()
    answer_tokens: int = 0
    served: ServedTokens = field(default_factory=ServedTokens)
    queue_seconds: float = 0.0
    reply: str = ""
    fault: str = ""
    is_cut: bool = False

    @property
    def is_answered(self) -> bool:
        """A whole reply."""
        return self.status == 200 and self.end is not None and not self.fault and not self.is_cut

    @property
    def is_refused(self) -> bool:
        """The server shed it."""
        return self.status == 429


def unanswered(tenant: str, due: float, fault: str = "", *, lag: float = 0.0, is_cut: bool = False) -> Record:
    """A request without a reply."""
    return Record(tenant, due, lag=lag, fault=fault, is_cut=is_cut)


def cut_record(tenant: str, due: float, began: float, exchange: Exchange) -> Record:
    """A request that the sender gives up: what had come of its reply by then, when its first token came above all."""
    if exchange.status != 200 or not exchange.has_text:
        return unanswered(tenant, due, lag=max(0.0, exchange.sent_at - began - due), is_cut=True)
    return replace(read_record(tenant, due, began, exchange), end=None, fault="", is_cut=True)


def read_record(tenant: str, due: float, began: float, exchange: Exchange) -> Record:
    """due: seconds behind `began`, a time of `time.perf_counter`."""
    started = began + due
    lag, end = exchange.sent_at - started, exchange.ended_at - started
    if exchange.status != 200:
        return Record(tenant, due, lag, exchange.status, end=end, fault=_error(exchange))
    times: list[float] = []
    text: list[str] = []
    last: dict[str, Any] = {}
    fault = "" if exchange.is_whole else "the stream was cut off"
    for event, at in _events(exchange):
        if "error" in event:
            fault = str(event["error"].get("message", "error"))
        for choice in event.get("choices") or ():
            content = choice.get("delta", {}).get("content")
            if content or (choice.get("finish_reason") and not times):
                times.append(at - started)
                text.append(content or "")
        if event.get("usage"):
            last = event
    gaps = tuple(late - soon for soon, late in pairwise(times))
    return Record(
        tenant,
        due,
        lag,
        200,
        first_token=times[0] if times else None,
        end=end,
        gaps=gaps,
        answer_tokens=int((last.get("usage") or {}).get("completion_tokens", 0)),
        served=_served(last),
        queue_seconds=float(((last.get("hypic") or {}).get("seconds") or {}).get("queue", 0.0)),
        reply="".join(text),
        fault=fault or ("" if times else "the stream had no token"),
    )


def _events(exchange: Exchange) -> Iterator[tuple[dict[str, Any], float]]:
    """Server-sent events, and when the end of each had arrived: chunks of the transfer are taken off by the way."""
    position = exchange.received.index(b"\r\n\r\n") + 4
    data = bytes(exchange.received)
    text = b""
    while position < len(data):
        line_end = data.find(b"\r\n", position)
        size = int(data[position:line_end].split(b";")[0] or b"0", 16) if line_end > 0 else 0
        if size == 0:
            return
        start = line_end + 2
        text += data[start : start + size]
        position = start + size + 2
        *whole, text = text.split(b"\n\n")
        at = exchange.time_of(min(start + size, len(data)) - 1)
        for event in whole:
            if event.startswith(b"data: {"):
                yield json.loads(event.removeprefix(b"data: ")), at


def _served(event: Mapping[str, Any]) -> ServedTokens:
    """By the reply's own account; where it gives none, by its usage."""
    parts = (event.get("hypic") or {}).get("parts")
    if parts is None:
        usage = event.get("usage") or {}
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        return ServedTokens(hit=cached, live=int(usage.get("prompt_tokens", 0)) - cached)
    reused = {"prefix": 0, "hit": 0}
    for part in parts:
        reused["prefix" if part["served"] == "prefix" else "hit"] += part["reused_tokens"]
    return ServedTokens(
        prefix=reused["prefix"],
        hit=reused["hit"],
        cold=sum(part["captured_tokens"] for part in parts),
        live=sum(part["live_tokens"] for part in parts),
    )


def _error(exchange: Exchange) -> str:
    body = bytes(exchange.received).partition(b"\r\n\r\n")[2]
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {exchange.status}"
