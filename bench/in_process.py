"""The same ratio without services: one engine, prompts of token ids."""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.served_model import read_served_model
from services.worker.engine.loop import Engine
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    GenerateEvent,
    GenerateRequest,
    PrefilledEvent,
    PromptPart,
    Serving,
    TokenEvent,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.settings import WorkerSettings

__all__ = ["PROMPT_TOKENS", "EngineTimes", "measure_engine"]

_ROUNDS = 5
_NUM_SEGMENTS = 8
_SEGMENT_TOKENS = 400
_QUESTION_TOKENS = 32
_DECODED = 64
PROMPT_TOKENS = _NUM_SEGMENTS * _SEGMENT_TOKENS + _QUESTION_TOKENS


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Medians: seconds from submit to the first token id; capture seconds a segment; decoded tokens a second."""

    off: float
    all_hits: float
    capture: float
    decode_rate: float
    segment_bytes: int


def measure_engine(checkpoint: Path) -> EngineTimes:
    """Segments are captured first; `off` runs the same ids with every part live."""
    settings = WorkerSettings.from_environment(checkpoint=checkpoint)
    served = read_served_model(settings)
    engine = build_engine(settings, served)
    segments = [_token_ids(seed, _SEGMENT_TOKENS, served.spec.vocab_size) for seed in range(_NUM_SEGMENTS)]
    captured = _capture(engine, segments)
    hits = [PromptPart(ids, Serving.SEGMENT, _key(index)) for index, ids in enumerate(segments)]
    live = [PromptPart(ids) for ids in segments]
    times: dict[str, list[float]] = {"off": [], "all_hits": []}
    rates: list[float] = []
    for number in range(_ROUNDS):
        question = PromptPart(_token_ids(1000 + number, _QUESTION_TOKENS, served.spec.vocab_size))
        turn = number % _NUM_SEGMENTS
        for mode, parts in (("all_hits", hits), ("off", live)):
            run = _generate(engine, (*parts[turn:], *parts[:turn], question))
            times[mode].append(run.first_token)
            if mode == "all_hits":
                rates.append(run.decode_rate)
    return EngineTimes(
        off=median(times["off"]),
        all_hits=median(times["all_hits"]),
        capture=median(event.seconds for event in captured),
        decode_rate=median(rates),
        segment_bytes=captured[0].size_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    first_token: float
    decode_rate: float


def _generate(engine: Engine, parts: tuple[PromptPart, ...]) -> _Run:
    stamps: list[float] = []
    served_live = 0

    def sink(event: GenerateEvent) -> None:
        nonlocal served_live
        if isinstance(event, TokenEvent):
            stamps.append(time.perf_counter())
        elif isinstance(event, PrefilledEvent):
            served_live = sum(bool(part.reason) for part in event.parts)

    started = time.perf_counter()
    engine.submit(GenerateRequest("bench", parts, SamplingOptions(_DECODED), sink))
    while not engine.is_idle:
        engine.step()
    if served_live:
        raise RuntimeError(f"{served_live} parts were recomputed: this run does not measure hits")
    return _Run(stamps[0] - started, (len(stamps) - 1) / (stamps[-1] - stamps[0]))


def _capture(engine: Engine, segments: list[tuple[int, ...]]) -> list[CaptureEvent]:
    events: list[CaptureEvent] = []
    for index, token_ids in enumerate(segments):
        job = CaptureJob("bench", (CaptureSegment(_key(index), token_ids),), events.append)
        engine.submit_capture(job)
        while not engine.is_idle:
            engine.step()
    if failed := [event.reason for event in events if event.reason]:
        raise RuntimeError(f"capture failed: {failed}")
    return events


def _key(index: int) -> bytes:
    return index.to_bytes(32, "big")


def _token_ids(seed: int, count: int, vocab_size: int) -> tuple[int, ...]:
    """Spread over the vocabulary; above the special tokens, which stand first or last."""
    return tuple(16 + (seed * 7919 + position * 104729) % (vocab_size - 32) for position in range(count))
