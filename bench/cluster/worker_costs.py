"""Costs of this machine's CPU with a checkpoint, measured on one engine in this process.

Passes and combines count processor seconds, the least of several rounds, so that what else the machine does falls out.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from pathlib import Path

import torch

from bench.engine_runs import Watch, run_until_idle, token_ids
from services.simulator.costs import CaptureCosts, CombineCosts, Costs, StateCosts, WayCosts
from services.worker.adapters.engine_builder import build_engine
from services.worker.adapters.served_model import ServedModel, read_served_model
from services.worker.engine.requests import (
    CaptureEvent,
    CaptureJob,
    CaptureSegment,
    GenerateRequest,
    PromptPart,
    Serving,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.settings import WorkerSettings

__all__ = ["Sizes", "measure_costs"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """passes: lengths of captures, the last one a whole chunk; segments, questions: of combines; segment_tokens: of their
    segments.
    """

    passes: tuple[int, ...] = (64, 128, 256, 512)
    segments: tuple[int, ...] = (1, 4, 8)
    questions: tuple[int, ...] = (16, 256)
    segment_tokens: int = 400
    rounds: int = 5


def measure_costs(checkpoint: Path, sizes: Sizes, way: WayCosts, source: str) -> Costs:
    """Of workers that are processes of this machine, with one way between any two.

    Raises:
        RuntimeError: a capture or a combine failed.
    """
    settings = WorkerSettings.from_environment(checkpoint=checkpoint)
    served = read_served_model(settings)
    meter = _Meter(settings, served, sizes.rounds)
    points = [(float(tokens), meter.capture_seconds([tokens])) for tokens in sizes.passes]
    longest = max(sizes.passes)
    points.append((2.0 * longest, meter.capture_seconds([longest, longest])))
    limits = meter.engine.limits
    return Costs(
        name=f"{served.name}, {platform.machine()} CPU, one thread a worker",
        source=source,
        layers=len(served.spec.layers),
        workers_per_host=1024,
        capture=CaptureCosts(_rising(points), limits.capture_tokens, meter.engine.context.profile.chunk_tokens),
        combine=_fit_combine(meter, sizes, limits.sweep_tokens),
        state=_state_costs(meter, sizes, settings.min_body),
        same_host=way,
        other_host=way,
    )


class _Meter:
    """One engine, with processor seconds of what it does."""

    def __init__(self, settings: WorkerSettings, served: ServedModel, rounds: int) -> None:
        self.engine = build_engine(settings, served)
        self._vocab_size = served.spec.vocab_size
        self._rounds = rounds
        self._seeds = count()

    def capture_seconds(self, lengths: Sequence[int]) -> float:
        """Of new segments that wait together."""
        return min(self._seconds(partial(self._capture, lengths)) for _ in range(self._rounds))

    def combine_seconds(self, num_segments: int, segment_tokens: int, question_tokens: int) -> float:
        """Of a prompt of stored segments and a new question."""
        segments = self._capture([segment_tokens] * num_segments)
        stored = tuple(PromptPart(segment.token_ids, Serving.SEGMENT, segment.key) for segment in segments)
        return min(self._seconds(partial(self._combine, stored, question_tokens)) for _ in range(self._rounds))

    def state_bytes(self, num_tokens: int) -> int:
        """Of a new segment's state."""
        (segment,) = self._capture([num_tokens])
        store = self.engine.context.store
        state = store.get(segment.key)
        if state is None:
            raise RuntimeError("a state that was stored has gone")
        return store.size_bytes(state)

    def _capture(self, lengths: Sequence[int]) -> list[CaptureSegment]:
        events: list[CaptureEvent] = []
        segments = [CaptureSegment(next(self._seeds).to_bytes(32), self._ids(tokens)) for tokens in lengths]
        self.engine.submit_capture(CaptureJob("bench", tuple(segments), events.append))
        run_until_idle(self.engine)
        if failed := [event.reason for event in events if event.reason]:
            raise RuntimeError(f"capture failed: {failed[0]}")
        return segments

    def _combine(self, stored: tuple[PromptPart, ...], question_tokens: int) -> None:
        watch = Watch()
        parts = (*stored, PromptPart(self._ids(question_tokens)))
        self.engine.submit(GenerateRequest("bench", parts, SamplingOptions(1), watch))
        run_until_idle(self.engine)
        watch.check()

    def _ids(self, num_tokens: int) -> tuple[int, ...]:
        return token_ids(next(self._seeds), num_tokens, self._vocab_size)

    @staticmethod
    def _seconds(action: Callable[[], object]) -> float:
        began = time.process_time()
        action()
        return time.process_time() - began


def _fit_combine(meter: _Meter, sizes: Sizes, sweep_tokens: int) -> CombineCosts:
    """Least squares: a pass, each composed segment, each live token; none below nothing."""
    seam = meter.engine.context.profile.seam_window.tokens(sizes.segment_tokens)
    rows, seconds = [], []
    for num_segments in sizes.segments:
        for question in sizes.questions:
            rows.append([1.0, float(num_segments), float(num_segments * seam + question)])
            seconds.append(meter.combine_seconds(num_segments, sizes.segment_tokens, question))
    fitted = torch.linalg.lstsq(
        torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)[:, None]
    )
    of_pass, of_segment, of_token = (max(value, 0.0) for value in fitted.solution.flatten().tolist())
    return CombineCosts(of_pass, of_segment, of_token, sweep_tokens)


def _state_costs(meter: _Meter, sizes: Sizes, min_body: int) -> StateCosts:
    context = meter.engine.context
    seam = context.profile.seam_window
    token_bytes = context.model.spec.token_bytes(context.memory.dtype.itemsize)
    body = sizes.segment_tokens - seam.tokens(sizes.segment_tokens)
    return StateCosts(
        segment_bytes=max(meter.state_bytes(sizes.segment_tokens) - token_bytes * body, 0),
        token_bytes=token_bytes,
        seam_window=seam.least,
        seam_share=seam.share,
        seam_window_max=seam.most,
        min_tokens=seam.least_segment(min_body),
    )


def _rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """No pass is quicker than a shorter one; where it was measured so, noise is what differs."""
    longest = accumulate((seconds for _, seconds in points), max)
    return tuple((tokens, seconds) for (tokens, _), seconds in zip(points, longest, strict=True))
