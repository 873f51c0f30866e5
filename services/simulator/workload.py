"""Requests of a trace as workers see them: segments to compose and live tokens."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.cache.traces import TraceRequest
from services.router.domain.assignment import ColdSegment
from services.simulator.costs import Costs
from services.simulator.errors import SimulationError

__all__ = ["Arrival", "distinct_bytes", "read_arrivals"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request. time: seconds from the first one; segments: distinct ones; num_composed: with those that stand twice."""

    time: float
    segments: tuple[ColdSegment, ...]
    num_composed: int
    live_tokens: int


def read_arrivals(trace: Iterable[TraceRequest], costs: Costs, speed: float) -> Iterator[Arrival]:
    """What a trace asks of workers, `speed` times as fast. Tenants share nothing.

    Parts without id and short ones are live; a prompt ends with at least one live token.

    Raises:
        SimulationError: `speed` is no positive number.
    """
    if not 0 < speed < math.inf:
        raise SimulationError(f"--speed: {speed} must be a positive number")
    begin: float | None = None
    for request in trace:
        begin = request.time if begin is None else begin
        composed = [part for part in request.parts if part.id and part.num_tokens >= costs.state.min_tokens]
        live = sum(part.num_tokens for part in request.parts) - sum(part.num_tokens for part in composed)
        segments = {
            (request.tenant, part.id): ColdSegment(
                f"{request.tenant}\0{part.id}".encode(),
                part.num_tokens,
                part.size_bytes or costs.state.size_bytes(part.num_tokens),
            )
            for part in composed
        }
        seams = sum(costs.state.seam(part.num_tokens) for part in composed)
        yield Arrival((request.time - begin) / speed, tuple(segments.values()), len(composed), max(live, 1) + seams)


def distinct_bytes(arrivals: Iterable[Arrival]) -> int:
    """Bytes of all states together, each once."""
    return sum({segment.key: segment.num_bytes for arrival in arrivals for segment in arrival.segments}.values())
