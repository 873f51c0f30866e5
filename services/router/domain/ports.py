"""Ports to the other services: the directory of states, and a worker."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from services.router.domain.plan import CacheEntry, Outcome, Snapshot, Ticket
from services.router.domain.request import Namespace, Refresh, Sampling
from services.router.domain.workers import WorkerView

__all__ = [
    "BeganFrom",
    "CaptureBatch",
    "CaptureOrder",
    "CaptureResult",
    "DecodedBy",
    "Directory",
    "FinishReason",
    "Finished",
    "GenerateEvent",
    "GenerateOrder",
    "Held",
    "HoldEvent",
    "PartOrder",
    "PartServing",
    "PlanAnswer",
    "PlanQuery",
    "Prefilled",
    "Released",
    "ServedPart",
    "Source",
    "TokenLogprobs",
    "Tokens",
    "Work",
    "Worker",
    "Workers",
]


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """Every look-up of one request; `lease_id` is set to add to the lease of an earlier plan.

    `admit_all` asks for tickets however seldom an entry was seen.
    """

    request_id: str
    namespace: Namespace
    model: str
    profile_digest: str
    entries: tuple[CacheEntry, ...]
    lease_seconds: float
    lease_id: str = ""
    admit_all: bool = False


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """Outcomes in the order of the query's entries, under one lease."""

    lease_id: str
    outcomes: tuple[Outcome, ...]


class Directory(Protocol):
    """The cache service. Every method raises a `HypicError` when it cannot answer in `timeout_seconds`."""

    async def plan(self, query: PlanQuery, timeout_seconds: float) -> PlanAnswer:
        """Look up all entries at once, atomically for each entry; creates or extends a lease and its tickets.

        A caller that is cancelled, or does not wait long enough, has nothing to release: a lease made for it is given back.
        """
        ...

    async def renew(self, lease_id: str, lease_seconds: float, timeout_seconds: float) -> None:
        """Extend a lease and its tickets."""
        ...

    async def release(self, lease_id: str, timeout_seconds: float) -> None:
        """End a lease and give up its unpublished tickets; a second call does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class CaptureOrder:
    """A segment to compute and publish under its ticket."""

    key: bytes
    token_ids: tuple[int, ...]
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class CaptureBatch:
    """Segments to capture, most urgent first; nobody waits for a background batch."""

    orders: tuple[CaptureOrder, ...]
    is_background: bool = False


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """`is_stored` is false when the worker does not hold the state; `reason` then says why."""

    key: bytes
    is_stored: bool
    reason: str


class PartServing(StrEnum):
    """How a worker serves a part."""

    LIVE = "live"
    SEGMENT = "segment"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Source:
    """A worker that holds a state, and where other workers reach it."""

    worker_id: str
    address: str


@dataclass(frozen=True, slots=True)
class PartOrder:
    """How a part is to be served; `key` is set for SEGMENT.

    ticket: where nothing is stored under the key, the worker computes a state as it combines, and publishes it so; sources:
    other workers that it may fetch the state from, which takes them so long more where they still compute it.
    """

    token_ids: tuple[int, ...]
    serving: PartServing
    key: bytes = b""
    ticket: Ticket | None = None
    sources: tuple[Source, ...] = ()
    source_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerateOrder:
    """A prompt to combine and decode; `sampling.max_tokens` is set.

    closing_ids: what ends the reply's message, where the state behind that is wanted; tenant: whose request it is.
    """

    request_id: str
    lease_id: str
    parts: tuple[PartOrder, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    prefix_key: bytes
    snapshots: tuple[Snapshot, ...]
    priority: int = 0
    refresh: Refresh = field(default_factory=lambda: Refresh(0))
    closing_ids: tuple[int, ...] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ServedPart:
    """What the worker did with a part; `reason` is set when it computed a part that was asked for as reused.

    source: the worker from which it fetched the state, in `fetch_seconds`; refreshed_tokens: live ones of its body.
    """

    serving: PartServing
    live_tokens: int
    reused_tokens: int
    tier: str
    reason: str
    captured_tokens: int = 0
    source: str = ""
    fetch_seconds: float = 0.0
    refreshed_tokens: int = 0


class BeganFrom(StrEnum):
    """What a reply was begun from: a decode state that was handed over, or the prompt, which the engine computed itself; or the
    worker that combined went on.
    """

    STATE = "state"
    PROMPT = "prompt"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class DecodedBy:
    """Which engine writes a reply, and what it began from; `reason` says why not from the composed state."""

    engine: str
    began_from: BeganFrom
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Once, with the first token; parts in the order's order.

    decoded_by: set where another engine than the combine worker may decode.
    """

    parts: tuple[ServedPart, ...]
    queue_seconds: float
    fetch_seconds: float
    combine_seconds: float
    decoded_by: DecodedBy | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A decode state of so many tokens waits under a handle for another engine."""

    handle: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Released:
    """The last event of a hold: the state was read to its end, or was not."""

    is_taken: bool


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model held a token: its natural logarithm, and the likeliest tokens with theirs, best first."""

    own: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Generated ids, in order; logprobs: one a token where they were asked for.

    Raises:
        ValueError: they are not one a token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} log probabilities for {len(self.token_ids)} tokens")


class FinishReason(StrEnum):
    """Why a reply ended: a stop token or string, `max_tokens`, or calls of tools, which the router finds in the text."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. held_key: of the state that the worker holds for a moment behind the reply; empty where it holds none."""

    reason: FinishReason
    decode_seconds: float
    generated_tokens: int
    held_key: bytes = b""


GenerateEvent = Prefilled | Tokens | Finished
HoldEvent = Prefilled | Held | Released


class Worker(Protocol):
    """A worker. Closing an iterator cancels the work behind it; every call raises a `HypicError` when it fails."""

    def capture(self, batch: CaptureBatch, timeout_seconds: float) -> AsyncGenerator[CaptureResult]:
        """Compute and publish segment states; one result a segment, in the order in which they end."""
        ...

    def generate(self, order: GenerateOrder, timeout_seconds: float) -> AsyncGenerator[GenerateEvent]:
        """Combine the parts of a prompt and decode."""
        ...

    def hold(self, order: GenerateOrder, timeout_seconds: float) -> AsyncGenerator[HoldEvent]:
        """Combine the parts of a prompt and hold its decode state, in place of decoding, until the iterator is closed."""
        ...

    async def keep(self, held_key: bytes, key: bytes, ticket: Ticket, timeout_seconds: float) -> str:
        """Publish a held state as a snapshot; why it is not, empty when it is."""
        ...

    async def drop(self, keys: Sequence[bytes], timeout_seconds: float) -> int:
        """Make states unreachable; the number of those that were held."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a call asks of a worker, by the worker's own speeds. capture_tokens: of segments; is_request: it will decode."""

    seconds: float
    capture_tokens: int = 0
    is_request: bool = False


class Workers(Protocol):
    """The workers that serve the model now."""

    def views(self) -> tuple[WorkerView, ...]:
        """Those that answer, as scheduling sees them: what this router has given them counts from the moment it is given."""
        ...

    def find(self, worker_id: str) -> Worker:
        """The worker with an id.

        Raises:
            UnavailableError: it cannot be reached now.
        """
        ...

    def sources(self, worker_ids: Sequence[str]) -> tuple[Source, ...]:
        """Those of these workers that others can fetch from, in the given order."""
        ...

    def occupy(self, worker_id: str, work: Work) -> AbstractContextManager[None]:
        """Count work of a worker from entering to leaving."""
        ...
