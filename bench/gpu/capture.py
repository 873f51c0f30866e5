"""Capturing segments, and what of it the transitions and end states cost."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from bench.engine_runs import capture_together, key
from bench.gpu.rig import Rig
from bench.results import Row
from services.worker.engine.loop import Engine
from services.worker.mixers.batch import LinearCarry, LinearPlane
from services.worker.mixers.linear import LinearMixer
from services.worker.ops.device import runs_kernels
from services.worker.ops.recurrence import CaptureResult, RecurrenceInputs, chunked
from services.worker.ops.recurrence import dispatch as recurrence

__all__ = ["measure"]


def measure(rig: Rig) -> Iterator[Row]:
    """One segment and several packed ones, short and long."""
    sizes = rig.sizes
    lengths = {sizes.short_tokens: 5.0, sizes.segment_tokens: 3.0}
    engine = rig.engine(sizes.waiting * sizes.segment_tokens, 4 * sizes.waiting + 8)
    for tokens, reach in lengths.items():
        for count in (1, sizes.waiting):
            yield from _measure(rig, engine, count, tokens, reach)


def _measure(rig: Rig, engine: Engine, count: int, tokens: int, reach: float) -> Iterator[Row]:
    """The pass and the same pass as a plain prefill, in turns; the first turn of each compiles."""
    whole: list[float] = []
    plain: list[float] = []
    for number in range(rig.sizes.rounds + 2):
        segments = {key(index): rig.ids(1000 * number + index, tokens) for index in range(count)}
        whole.append(_capture(engine, segments))
        with _plain_prefill():
            plain.append(_capture(engine, segments))
    name = f"{count} x {tokens:,} tokens"
    seconds, without = median(whole[1:]), median(plain[1:])
    yield Row(f"capture, {name}", 1e3 * seconds, "ms", better="lower")
    yield Row(f"the same pass without transitions and end states, {name}", 1e3 * without, "ms", better="lower")
    share = 100 * (seconds - without) / without
    yield Row(f"transitions and end states, share of the prefill, {name}", share, "%", reach, "lower")


def _capture(engine: Engine, segments: dict[bytes, tuple[int, ...]]) -> float:
    seconds = capture_together(engine, segments)
    for name in segments:
        engine.context.store.drop(name)
    return seconds


@contextmanager
def _plain_prefill() -> Iterator[None]:
    """Captures carry the state alone, through each segment in one run."""
    with patch.object(recurrence, "capture", _scan), patch.object(LinearMixer, "finish", _leave):
        yield


def _scan(
    inputs: RecurrenceInputs,
    cu_runs: Sequence[int],
    seam_tokens: Sequence[int],
    states: torch.Tensor,
    transitions: torch.Tensor | None,
    prepared: dict[str, Any] | None = None,
) -> CaptureResult:
    """As `recurrence.capture`, with what was given for the transitions."""
    if runs_kernels(inputs.q):
        from services.worker.ops.recurrence import triton

        result = triton.scan(inputs, cu_runs, states, None, prepared)
    else:
        result = chunked.scan(inputs, cu_runs, states, None)
    return CaptureResult(result.outputs, result.states, states, states if transitions is None else transitions)


def _leave(mixer: LinearMixer, carries: Sequence[LinearCarry], firsts: Sequence[int]) -> list[LinearPlane]:
    """As `LinearMixer.finish`: the states as they are."""
    nothing = carries[0].tail.new_empty(0)
    return [LinearPlane(nothing, carry.state.clone(), carry.tail.clone(), nothing) for carry in carries]
