"""Replays a trace through an eviction policy, with the room, scores and leases of the in-memory directory."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.cache.adapters.memory_room import Room
from services.cache.domain.admission import is_admitted
from services.cache.domain.eviction import Policy, Use
from services.cache.domain.values import EntryKind, Limits
from services.cache.traces import TracePart, TraceRequest

__all__ = ["Costs", "ReplayResult", "distinct_bytes", "replay"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What states weigh and computing takes; the defaults are Qwen3.5-35B-A3B's in fp32 on an H200.

    segment_bytes, token_bytes: a state's size, where the trace gives none; seconds_per_token: of computing a segment;
    seconds_per_hit: of using a stored one; capture_share: what capturing takes beyond computing in place.
    """

    segment_bytes: int = 120 << 20
    token_bytes: int = 20 << 10
    seconds_per_token: float = 2e-5
    seconds_per_hit: float = 0.002
    capture_share: float = 0.15

    def size_bytes(self, part: TracePart) -> int:
        """Bytes of a part's state."""
        return part.size_bytes or self.segment_bytes + self.token_bytes * part.num_tokens

    def saved_seconds(self, part: TracePart) -> float:
        """What a hit saves; one that takes longer than computing saves nothing, since it is computed then."""
        return max(part.num_tokens * self.seconds_per_token - self.seconds_per_hit, 0.0)


@dataclass(slots=True)
class ReplayResult:
    """Sums over a trace. Requests count that ask for a segment, as hits when all of theirs are; segments once a request.

    `saved_seconds`: of hits, less what captures took beyond computing in place.
    """

    requests: int = 0
    hit_requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    bytes: int = 0
    hit_bytes: int = 0
    captures: int = 0
    evictions: int = 0
    saved_seconds: float = 0.0

    @property
    def request_ratio(self) -> float:
        """Requests whose segments were all there."""
        return self.hit_requests / max(self.requests, 1)

    @property
    def token_ratio(self) -> float:
        """Tokens of segments that were there."""
        return self.hit_tokens / max(self.tokens, 1)

    @property
    def byte_ratio(self) -> float:
        """Bytes of states that were there."""
        return self.hit_bytes / max(self.bytes, 1)


@dataclass(slots=True)
class _Stored:
    """A stored segment."""

    tenant: str
    num_tokens: int
    size_bytes: int
    uses: int = 0
    score: float = 0.0


def distinct_bytes(trace: Iterable[TraceRequest], costs: Costs) -> int:
    """Bytes of all states together, each once."""
    sizes = {_key(request, part): costs.size_bytes(part) for request in trace for part in request.parts if part.id}
    return sum(sizes.values())


def replay(trace: Iterable[TraceRequest], policy: Policy, limits: Limits, costs: Costs) -> ReplayResult:
    """What a directory with these limits would have served."""
    replayed = _Replay(policy, limits, costs)
    for request in trace:
        replayed.serve(request)
    return replayed.result


class _Replay:
    """A directory with one worker, one request after the other."""

    def __init__(self, policy: Policy, limits: Limits, costs: Costs) -> None:
        self._policy, self._limits, self._costs = policy, limits, costs
        self._room = Room(limits)
        self._stored: dict[bytes, _Stored] = {}
        self.result = ReplayResult()

    def serve(self, request: TraceRequest) -> None:
        """Look everything up, store what is missing, then give up the lease over all of it."""
        parts = {_key(request, part): part for part in request.parts if part.id}
        if not parts:
            return
        self._room.see_tenant(request.tenant, request.time)
        self._room.forget_tenants(request.time)
        hits = [key for key in parts if key in self._stored]
        for key in hits:
            self._use(key, request.time)
            self._room.set_busy(key)
        self._count(parts, hits)
        for key in self._admitted(parts, hits):
            self._store(key, request, parts[key])
        for key in parts.keys() & self._stored.keys():
            self._room.set_idle(key, request.tenant, self._stored[key].score)

    def _admitted(self, parts: dict[bytes, TracePart], hits: list[bytes]) -> list[bytes]:
        absent = [key for key in parts if key not in hits]
        if self._limits.min_uses <= 1:
            return absent
        return [key for key in absent if is_admitted(EntryKind.SEGMENT, self._room.sight(key), self._limits.min_uses)]

    def _store(self, key: bytes, request: TraceRequest, part: TracePart) -> None:
        size_bytes = self._costs.size_bytes(part)
        capture_seconds = part.num_tokens * self._costs.seconds_per_token * self._costs.capture_share
        self.result.captures += 1
        self.result.saved_seconds -= capture_seconds
        victims = self._room.victims(request.tenant, size_bytes, key, lambda held: self._stored[held].size_bytes)
        if victims is None:
            return
        for victim in victims:
            gone = self._stored.pop(victim.key)
            self._room.clock = max(self._room.clock, victim.score)
            self._room.set_busy(victim.key)
            self._room.count_copy(gone.tenant, -gone.size_bytes)
        self.result.evictions += len(victims)
        self._stored[key] = _Stored(request.tenant, part.num_tokens, size_bytes)
        self._use(key, request.time)
        self._room.count_copy(request.tenant, size_bytes)

    def _use(self, key: bytes, now: float) -> None:
        stored = self._stored[key]
        stored.uses += 1
        stored.score = self._policy(Use(stored.uses, stored.num_tokens, stored.size_bytes, now, self._room.clock))

    def _count(self, parts: dict[bytes, TracePart], hits: list[bytes]) -> None:
        result = self.result
        result.requests += 1
        result.hit_requests += len(hits) == len(parts)
        for key, part in parts.items():
            size_bytes = self._costs.size_bytes(part)
            result.tokens += part.num_tokens
            result.bytes += size_bytes
            if key in self._stored:
                result.hit_tokens += part.num_tokens
                result.hit_bytes += size_bytes
                result.saved_seconds += self._costs.saved_seconds(part)


def _key(request: TraceRequest, part: TracePart) -> bytes:
    return f"{request.tenant}\0{part.id}".encode()
