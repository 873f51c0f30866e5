"""What the engine is asked to do, and what it says back."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from services.worker.engine.grammar import TokenGrammar
from services.worker.engine.logprobs import TokenLogprobs
from services.worker.engine.refresh import RefreshOrder
from services.worker.engine.sampling import SamplingOptions
from services.worker.engine.transfer import IncomingState
from services.worker.errors import WorkerError

__all__ = [
    "CaptureEvent",
    "CaptureJob",
    "CaptureSegment",
    "EngineError",
    "EngineFullError",
    "FailedEvent",
    "FetchEvent",
    "FinishReason",
    "FinishedEvent",
    "GenerateEvent",
    "GenerateRequest",
    "HeldEvent",
    "NotServedError",
    "PrefilledEvent",
    "PromptPart",
    "PromptTooLargeError",
    "ServedPart",
    "Serving",
    "SnapshotOrder",
    "StoredSnapshot",
    "TokenEvent",
    "TurnHeldEvent",
    "TurnHold",
]


class EngineError(WorkerError):
    """The root of the engine's errors."""


class EngineFullError(EngineError):
    """The waiting line is full; try again later."""


class PromptTooLargeError(EngineError):
    """The prompt can never be served; the message names the limit."""


class NotServedError(EngineError):
    """This engine does not do what is asked; the message says what would."""


class Serving(StrEnum):
    """How a part is served: live in place, from a segment state, or covered by the prefix snapshot."""

    LIVE = "live"
    SEGMENT = "segment"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One part of a prompt; `key` names the stored state with SEGMENT.

    captures: where no state is stored under the key, it is computed, stored and used; is_fetched: where none is, it is brought
    from elsewhere, and used layer by layer as it comes.
    """

    token_ids: tuple[int, ...]
    serving: Serving = Serving.LIVE
    key: bytes = b""
    captures: bool = False
    is_fetched: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """Store the exact state in front of part `after_part` under a key."""

    key: bytes
    after_part: int


@dataclass(frozen=True, slots=True)
class ServedPart:
    """What became of a part. reason: why a part that was to be reused was computed; tier: where its state lay.

    refreshed_tokens: live ones of a body whose state was used for the others, or left aside where no others are.
    captured_tokens: of a body whose state this request has computed; live, reused and captured tokens are the whole part.
    source, fetch_seconds: the worker from which the state was fetched for it, and how long that took.
    """

    serving: Serving
    live_tokens: int
    reused_tokens: int
    tier: str = ""
    reason: str = ""
    captured_tokens: int = 0
    source: str = ""
    fetch_seconds: float = 0.0
    refreshed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A snapshot that now stands in the store."""

    key: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PrefilledEvent:
    """The prompt is combined; the first token follows. fetch_seconds: for which nothing ran, since layers had yet to come;
    layer_waits: those seconds by the layer that was waited for.
    """

    parts: tuple[ServedPart, ...]
    queue_seconds: float
    combine_seconds: float
    fetch_seconds: float
    snapshots: tuple[StoredSnapshot, ...]
    layer_waits: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. logprobs: where the request asks for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The last event of a request that went well. holds: a `TurnHeldEvent` follows."""

    reason: FinishReason
    decode_seconds: float
    generated_tokens: int
    holds: bool = False


@dataclass(frozen=True, slots=True)
class TurnHeldEvent:
    """The state behind a turn is in the store under its hold's key; 0 bytes where there was no room for it."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The last event of a request that did not."""

    error: EngineError


@dataclass(frozen=True, slots=True)
class CaptureEvent:
    """One segment's end. `reason` is empty when its state is stored; pass_tokens: of all that shared its pass."""

    key: bytes
    size_bytes: int
    seconds: float
    reason: str = ""
    pass_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FetchEvent:
    """Room is reserved for a state that is to be brought from elsewhere: it comes, or fails, under this key."""

    key: bytes
    incoming: IncomingState


@dataclass(frozen=True, slots=True)
class HeldEvent:
    """The last event of a request that is held: its decode state waits for a reader."""

    num_tokens: int
    size_bytes: int


GenerateEvent = (
    CaptureEvent | FetchEvent | PrefilledEvent | TokenEvent | HeldEvent | FinishedEvent | TurnHeldEvent | FailedEvent
)


@dataclass(frozen=True, slots=True)
class TurnHold:
    """Where a reply ends with the first of these tokens, run all of them and store the state behind them under a key.

    closing_ids: what ends the reply's message in the next prompt; at least one.
    """

    key: bytes
    closing_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Combine parts and decode. `sink` gets every event, on the engine's thread. priority: where requests wait, lower is sooner.

    One `CaptureEvent` a segment that a part orders to capture comes ahead of the `PrefilledEvent`, and a `FetchEvent` for every
    state that is to be brought from elsewhere. grammar: what the reply is held to, where the sampler draws itself. is_held:
    nothing is decoded; the decode state waits until it has been read, or the request is cancelled. refresh: which
    blocks of stored bodies are recomputed in place, none without.
    turn: the state behind the reply's message is wanted, if it ends by itself and within `max_tokens`. tenant: who takes turns
    with others where requests wait; any bytes that tell tenants apart.
    """

    request_id: str
    parts: tuple[PromptPart, ...]
    sampling: SamplingOptions
    sink: Callable[[GenerateEvent], None]
    prefix_key: bytes = b""
    snapshots: tuple[SnapshotOrder, ...] = ()
    grammar: TokenGrammar | None = None
    priority: int = 0
    is_held: bool = False
    refresh: RefreshOrder | None = None
    turn: TurnHold | None = None
    tenant: bytes = b""

    @property
    def work(self) -> int:
        """Tokens that run for it: those of parts that no stored state is expected for, and the reply's at most."""
        computed = (part for part in self.parts if part.serving is Serving.LIVE or part.captures)
        return sum(len(part.token_ids) for part in computed) + self.sampling.max_tokens

    @property
    def prompt_ids(self) -> Iterator[int]:
        """All of the prompt's tokens."""
        return chain.from_iterable(part.token_ids for part in self.parts)


@dataclass(frozen=True, slots=True)
class CaptureSegment:
    """One segment to capture under a key."""

    key: bytes
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """Capture segments, one after the other in the given order. `sink` gets one event each, on the engine's thread."""

    request_id: str
    segments: tuple[CaptureSegment, ...]
    sink: Callable[[CaptureEvent], None]
    background: bool = False
