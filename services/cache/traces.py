"""Traces of requests: which parts they ask for, for whom and when. docs/operations.md describes the file's format."""

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RAGPULSE_LIKE", "TraceError", "TracePart", "TraceRequest", "TraceShape", "draw_trace", "read_trace"]

_MOONCAKE_BLOCK = 512


class TraceError(Exception):
    """A file is no trace; the message names file, line, field and remedy."""


@dataclass(frozen=True, slots=True)
class TracePart:
    """A part of a prompt. id: what makes two parts the same, empty for one that is never reused; size_bytes 0 is unknown."""

    id: str
    num_tokens: int
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request; time in seconds from any start."""

    time: float
    tenant: str
    parts: tuple[TracePart, ...]


def read_trace(path: Path) -> tuple[TraceRequest, ...]:
    """The requests of a file by time: our own format, a Mooncake trace, or a folder with the files of RAGPulse.

    Raises:
        TraceError: it is none of them.
    """
    try:
        if path.is_dir():
            requests = list(_ragpulse(path))
        else:
            requests = [_request(path, number, content) for number, content in _objects(path)]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    if not requests:
        raise TraceError(f"{path}: holds no request")
    return tuple(sorted(requests, key=lambda request: request.time))


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except ValueError as error:
                raise TraceError(f"{path}:{number}: is no JSON object ({error})") from error
            if not isinstance(content, dict):
                raise TraceError(f"{path}:{number}: must be a JSON object, one a line")
            yield number, content


def _request(path: Path, number: int, content: dict[str, Any]) -> TraceRequest:
    try:
        if "hash_ids" in content:
            return _mooncake(content)
        parts = tuple(
            TracePart(str(part.get("id", "")), _positive(part, "tokens"), _bytes(part)) for part in content["parts"]
        )
        return TraceRequest(_time(content["time"]), str(content.get("tenant", "")), parts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(
            f"{path}:{number}: {error!r}; a request is "
            '{"time": seconds, "tenant": name, "parts": [{"id": name, "tokens": number}]}'
        ) from error


def _positive(part: dict[str, Any], field: str) -> int:
    value = int(part[field])
    if value <= 0:
        raise ValueError(f"{field} must be positive")
    return value


def _bytes(part: dict[str, Any]) -> int:
    value = int(part.get("bytes", 0))
    if value < 0:
        raise ValueError("bytes must not be negative")
    return value


def _time(value: Any) -> float:  # noqa: ANN401 # whatever the file says
    time = float(value)
    if not math.isfinite(time):
        raise ValueError("time must be finite")
    return time


def _mooncake(content: dict[str, Any]) -> TraceRequest:
    """Blocks of 512 tokens, named by all that precedes them; each is taken as a segment."""
    blocks = content["hash_ids"]
    last = int(content["input_length"]) - _MOONCAKE_BLOCK * (len(blocks) - 1)
    lengths = [*[_MOONCAKE_BLOCK] * (len(blocks) - 1), max(min(last, _MOONCAKE_BLOCK), 1)]
    parts = tuple(TracePart(str(block), tokens) for block, tokens in zip(blocks, lengths, strict=True))
    return TraceRequest(_time(content["timestamp"]) / 1000, "", parts)


def _ragpulse(folder: Path) -> Iterator[TraceRequest]:
    """Passages and pages found on the web are segments; system prompt, history and question are live."""
    names = ("1_sys_prompt", "2_passages", "3_history", "4_user_input", "5_web_search")
    tokens: dict[int, int] = {}
    for name in names:
        for _, content in _objects(folder / f"{name}.jsonl"):
            *_, identity, length = content.values()
            tokens[identity] = length
    path = folder / "0_trace.jsonl"
    for number, content in _objects(path):
        try:
            ids = content["hash_ids"]
            segments = [TracePart(str(one), tokens[one]) for one in ids["passages_ids"] + ids["web_search"]]
            live = [TracePart("", tokens[one]) for kind in ("sys_prompt", "history", "user_input") for one in ids[kind]]
            yield TraceRequest(_time(content["timestamp"]), "", (*segments, *live))
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}:{number}: {error!r} is no request of RAGPulse") from error


@dataclass(frozen=True, slots=True)
class TraceShape:
    """A synthetic trace: documents by Zipf's law, of which some are replaced by new ones at every use.

    share_with_parts: requests that ask for documents at all; tokens: lognormal by median and sigma, cut at the longest;
    churn: probability that a chosen document is a new one from then on; rate: requests a second; once: parts of every
    request that nobody asks for again; tenants share nothing.
    """

    requests: int = 4000
    documents: int = 2000
    parts: int = 5
    share_with_parts: float = 1.0
    exponent: float = 1.0
    churn: float = 0.002
    median_tokens: float = 400.0
    sigma: float = 1.0
    longest_tokens: int = 4096
    rate: float = 2.0
    once: int = 0
    tenants: int = 1


# Six passages of up to 512 tokens for four requests in five, as a production RAG service reports of one week.
RAGPULSE_LIKE = TraceShape(
    requests=7000,
    documents=3300,
    parts=6,
    share_with_parts=0.8,
    exponent=0.8,
    churn=0.0005,
    median_tokens=240.0,
    sigma=0.5,
    longest_tokens=512,
    rate=7000 / (7 * 86400),
)


def draw_trace(shape: TraceShape, seed: int) -> tuple[TraceRequest, ...]:
    """The same trace for the same shape and seed."""
    source = random.Random(seed)
    names = itertools.count()
    weights = list(itertools.accumulate(1 / (rank + 1) ** shape.exponent for rank in range(shape.documents)))

    def new_part() -> TracePart:
        drawn = source.lognormvariate(0.0, shape.sigma) * shape.median_tokens
        return TracePart(f"document-{next(names)}", max(min(int(drawn), shape.longest_tokens), 16))

    catalogues = [[new_part() for _ in range(shape.documents)] for _ in range(shape.tenants)]
    time, requests = 0.0, []
    for _ in range(shape.requests):
        time += source.expovariate(shape.rate)
        tenant = source.randrange(shape.tenants)
        parts: list[TracePart] = []
        if source.random() < shape.share_with_parts:
            for rank in dict.fromkeys(source.choices(range(shape.documents), cum_weights=weights, k=shape.parts)):
                if source.random() < shape.churn:
                    catalogues[tenant][rank] = new_part()
                parts.append(catalogues[tenant][rank])
        parts += [new_part() for _ in range(shape.once)]
        requests.append(TraceRequest(time, f"tenant-{tenant}", tuple(parts)))
    return tuple(requests)
