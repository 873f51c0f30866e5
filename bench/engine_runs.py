"""One engine in this process, driven request by request."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.engine.loop import Engine
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    GenerateEvent,
    GenerateRequest,
    PrefilledEvent,
    PromptPart,
    TokenEvent,
)
from services.worker.engine.sampling import SamplingOptions

__all__ = ["Run", "capture", "generate", "key", "token_ids"]


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds from submit to the first token id on the host; tokens a second behind it."""

    first_token: float
    decode_rate: float


def generate(engine: Engine, parts: tuple[PromptPart, ...], decoded: int, prefix_key: bytes = b"") -> Run:
    """One request alone.

    Raises:
        RuntimeError: a part that was to be reused was recomputed.
    """
    stamps: list[float] = []
    served_live = 0

    def sink(event: GenerateEvent) -> None:
        nonlocal served_live
        if isinstance(event, TokenEvent):
            stamps.append(time.perf_counter())
        elif isinstance(event, PrefilledEvent):
            served_live = sum(bool(part.reason) for part in event.parts)

    started = time.perf_counter()
    engine.submit(GenerateRequest("bench", parts, SamplingOptions(decoded), sink, prefix_key))
    while not engine.is_idle:
        engine.step()
    if served_live:
        raise RuntimeError(f"{served_live} parts were recomputed: this run does not measure hits")
    rate = (len(stamps) - 1) / (stamps[-1] - stamps[0]) if len(stamps) > 1 else 0.0
    return Run(stamps[0] - started, rate)


def capture(engine: Engine, segments: Sequence[tuple[int, ...]]) -> list[CaptureEvent]:
    """Segments one after the other, under `key(0)`, `key(1)`, ….

    Raises:
        RuntimeError: a capture failed.
    """
    events: list[CaptureEvent] = []
    for index, ids in enumerate(segments):
        job = CaptureJob("bench", (CaptureSegment(key(index), ids),), events.append)
        engine.submit_capture(job)
        while not engine.is_idle:
            engine.step()
    if failed := [event.reason for event in events if event.reason]:
        raise RuntimeError(f"capture failed: {failed}")
    return events


def key(index: int) -> bytes:
    """The stored key of a segment."""
    return index.to_bytes(32, "big")


def token_ids(seed: int, count: int, vocab_size: int) -> tuple[int, ...]:
    """Spread over the vocabulary; above the special tokens, which stand first or last."""
    return tuple(16 + (seed * 7919 + position * 104729) % (vocab_size - 32) for position in range(count))
