"""The same ratio without services: one engine, prompts of token ids."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.engine_runs import capture, generate, key, token_ids
from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.served_model import read_served_model
from services.worker.engine.requests import PromptPart, Serving
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
    segments = [token_ids(seed, _SEGMENT_TOKENS, served.spec.vocab_size) for seed in range(_NUM_SEGMENTS)]
    captured = capture(engine, segments)
    hits = [PromptPart(ids, Serving.SEGMENT, key(index)) for index, ids in enumerate(segments)]
    live = [PromptPart(ids) for ids in segments]
    times: dict[str, list[float]] = {"off": [], "all_hits": []}
    rates: list[float] = []
    for number in range(_ROUNDS):
        question = PromptPart(token_ids(1000 + number, _QUESTION_TOKENS, served.spec.vocab_size))
        turn = number % _NUM_SEGMENTS
        for mode, parts in (("all_hits", hits), ("off", live)):
            run = generate(engine, (*parts[turn:], *parts[:turn], question), _DECODED)
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
