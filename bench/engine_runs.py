"""One engine in this process, driven request by request or by several at once."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from services.worker.engine.loop import Engine
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    FailedEvent,
    GenerateEvent,
    GenerateRequest,
    PrefilledEvent,
    PromptPart,
    SnapshotOrder,
    TokenEvent,
)
from services.worker.engine.sampling import SamplingOptions

__all__ = [
    "FirstTokens",
    "Run",
    "Watch",
    "capture",
    "capture_together",
    "first_tokens",
    "generate",
    "key",
    "named_key",
    "remember_prefix",
    "run_until_idle",
    "synchronise",
    "token_ids",
]


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds from submit to the first token id on the host; tokens a second behind it."""

    first_token: float
    decode_rate: float


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """seconds: from the first submit until every request has its first token on the host; ids: one a request."""

    seconds: float
    ids: tuple[int, ...]


class Watch:
    """A request's sink: when its tokens came, and whether everything was reused or captured as it was meant to be."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.ids: list[int] = []
        self._reasons: list[str] = []
        self._failure: Exception | None = None

    def __call__(self, event: GenerateEvent) -> None:
        """Take an event."""
        if isinstance(event, TokenEvent):
            self.stamps.append(time.perf_counter())
            self.ids.append(event.token_id)
        elif isinstance(event, PrefilledEvent):
            self._reasons += [part.reason for part in event.parts if part.reason]
        elif isinstance(event, FailedEvent):
            self._failure = event.error
        elif isinstance(event, CaptureEvent):
            self._reasons += [event.reason] if event.reason else []

    def check(self) -> None:
        """Whether every part was served as asked, and the logits were finite: the engine refuses others.

        Raises:
            RuntimeError: it was not so.
        """
        if self._failure is not None:
            raise RuntimeError(f"a request failed: {self._failure}") from self._failure
        if self._reasons:
            raise RuntimeError(
                f"{len(self._reasons)} parts were recomputed or not stored, so that this run does not measure what it is "
                f"meant to: {', '.join(sorted(set(self._reasons)))}"
            )


def generate(engine: Engine, parts: tuple[PromptPart, ...], decoded: int, prefix_key: bytes = b"") -> Run:
    """One request alone.

    Raises:
        RuntimeError: a part that was to be reused was recomputed, or the request failed.
    """
    watch = Watch()
    started = time.perf_counter()
    engine.submit(GenerateRequest("bench", parts, SamplingOptions(decoded), watch, prefix_key))
    run_until_idle(engine)
    watch.check()
    stamps = watch.stamps
    rate = (len(stamps) - 1) / (stamps[-1] - stamps[0]) if len(stamps) > 1 else 0.0
    return Run(stamps[0] - started, rate)


def first_tokens(engine: Engine, prompts: Sequence[tuple[PromptPart, ...]], prefix_key: bytes = b"") -> FirstTokens:
    """Requests that wait together, one token each.

    Raises:
        RuntimeError: a part that was to be reused was recomputed, or a request failed.
    """
    watches = [Watch() for _ in prompts]
    synchronise(engine)
    started = time.perf_counter()
    for number, (parts, watch) in enumerate(zip(prompts, watches, strict=True)):
        engine.submit(GenerateRequest(f"bench-{number}", parts, SamplingOptions(1), watch, prefix_key))
    run_until_idle(engine)
    for watch in watches:
        watch.check()
    return FirstTokens(max(watch.stamps[0] for watch in watches) - started, tuple(watch.ids[0] for watch in watches))


def capture(engine: Engine, segments: Sequence[tuple[int, ...]]) -> list[CaptureEvent]:
    """Segments one after the other, under `key(0)`, `key(1)`, ….

    Raises:
        RuntimeError: a capture failed.
    """
    events: list[CaptureEvent] = []
    for index, ids in enumerate(segments):
        engine.submit_capture(CaptureJob("bench", (CaptureSegment(key(index), ids),), events.append))
        run_until_idle(engine)
    _check_captures(events)
    return events


def capture_together(engine: Engine, segments: Mapping[bytes, tuple[int, ...]]) -> float:
    """Segments by key, submitted at once; seconds until all are stored and the device has nothing left to do.

    Raises:
        RuntimeError: a capture failed.
    """
    events: list[CaptureEvent] = []
    orders = tuple(CaptureSegment(name, ids) for name, ids in segments.items())
    synchronise(engine)
    started = time.perf_counter()
    engine.submit_capture(CaptureJob("bench", orders, events.append))
    run_until_idle(engine)
    synchronise(engine)
    seconds = time.perf_counter() - started
    _check_captures(events)
    return seconds


def _check_captures(events: Sequence[CaptureEvent]) -> None:
    if failed := [event.reason for event in events if event.reason]:
        raise RuntimeError(f"capture failed: {failed}")


def remember_prefix(engine: Engine, token_ids: tuple[int, ...], name: bytes) -> None:
    """Compute a prompt's beginning and keep the exact state behind it."""
    order, watch = SnapshotOrder(name, 1), Watch()
    parts = (PromptPart(token_ids), PromptPart((17,)))
    engine.submit(GenerateRequest("prefix", parts, SamplingOptions(1), watch, b"", (order,)))
    run_until_idle(engine)
    watch.check()


def run_until_idle(engine: Engine) -> None:
    """Until nothing is left to do."""
    while not engine.is_idle:
        engine.step()


def synchronise(engine: Engine) -> None:
    """Wait until the device has done what it was given."""
    if engine.context.device.type == "cuda":
        torch.cuda.synchronize(engine.context.device)


def key(index: int) -> bytes:
    """The stored key of a segment."""
    return index.to_bytes(32, "big")


def named_key(name: str) -> bytes:
    """A stored key that is no segment's."""
    return name.encode().rjust(32, b"\xff")


def token_ids(seed: int, count: int, vocab_size: int) -> tuple[int, ...]:
    """Spread over the vocabulary; above the special tokens, which stand first or last."""
    return tuple(16 + (seed * 7919 + position * 104729) % (vocab_size - 32) for position in range(count))
