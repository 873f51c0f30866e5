"""The engine on one GPU at a true shape, weights drawn from a seed: first tokens, capture, decoding, memory.

`python -m bench.gpu --out FILE`; needs torch, triton, numpy, safetensors, tokenizers and typer.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from bench.engine_runs import capture, generate, key, token_ids
from bench.results import Row, write_results
from services.worker.engine.context import CaptureProfile, EngineContext
from services.worker.engine.limits import EngineLimits
from services.worker.engine.loop import Engine
from services.worker.engine.requests import (
    CaptureEvent,
    GenerateRequest,
    PromptPart,
    Serving,
    SnapshotOrder,
    TokenEvent,
)
from services.worker.engine.sampling import SamplingOptions
from services.worker.engine.seam import SeamWindow
from services.worker.inspection.report import inspect_checkpoint
from services.worker.mixers.state import DeviceMemory
from services.worker.models.registry import draw_model

_CONFIG = Path("tests/data/configs/Qwen3.5-35B-A3B")
_PAGE_TOKENS = 64
_SYSTEM_TOKENS, _QUESTION_TOKENS, _SEAM = 512, 64, 32
_PREFIX_KEY = bytes(31) + b"p"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Segments of one prompt, tokens of each, and how often a figure is taken."""

    segments: int
    segment_tokens: int
    rounds: int

    @property
    def prompt_tokens(self) -> int:
        """Documents and question."""
        return self.segments * self.segment_tokens + _QUESTION_TOKENS


def build(config: Path, sizes: Sizes, seed: int, device: torch.device, dtype: torch.dtype) -> Engine:
    """An engine with room for the stored segments, one prompt of as many live tokens, and 64 decoding requests."""
    pages = 3 * (sizes.prompt_tokens + _SYSTEM_TOKENS) // _PAGE_TOKENS + 64 * 8 + 1024
    memory = DeviceMemory(device, dtype, pages, _PAGE_TOKENS, num_slots=65)
    with torch.inference_mode():
        model = draw_model(config, memory, seed)
    prime = token_ids(7, 64, model.spec.vocab_size)
    context = EngineContext.create(model, memory, CaptureProfile(SeamWindow(_SEAM), prime), state_bytes=1 << 35)
    limits = EngineLimits(model.spec.context_length, max_running=64, layer_tokens=1 << 40, capture_tokens=1 << 15)
    return Engine(context, limits)


def measure_first_token(engine: Engine, sizes: Sizes, active_parameters: int) -> list[Row]:
    """All hits, against a full recompute behind an exact prefix cache of the system prompt."""
    vocabulary = engine.context.model.spec.vocab_size
    segments = [token_ids(seed, sizes.segment_tokens, vocabulary) for seed in range(sizes.segments)]
    captured = capture(engine, segments)
    system = token_ids(99, _SYSTEM_TOKENS, vocabulary)
    _remember_prefix(engine, system)
    hits: list[float] = []
    exact: list[float] = []
    for number in range(sizes.rounds + 1):
        question = PromptPart(token_ids(1000 + number, _QUESTION_TOKENS, vocabulary))
        order = [(number + index) % sizes.segments for index in range(sizes.segments)]
        prefix = PromptPart(system, Serving.PREFIX)
        stored = [PromptPart(segments[index], Serving.SEGMENT, key(index)) for index in order]
        live = [PromptPart(segments[index]) for index in order]
        hits.append(generate(engine, (prefix, *stored, question), 1, _PREFIX_KEY).first_token)
        exact.append(generate(engine, (prefix, *live, question), 1, _PREFIX_KEY).first_token)
    name = f"{sizes.segments} segments of {sizes.segment_tokens:,} tokens"
    # The first round compiles and warms up.
    seconds_hits, seconds_exact = median(hits[1:]), median(exact[1:])
    rate = 2 * active_parameters * sizes.prompt_tokens / seconds_exact
    return [
        Row(f"time to first token, all hits, {name}", 1e3 * seconds_hits, "ms", better="lower"),
        Row(f"time to first token, exact prefix cache, {name}", 1e3 * seconds_exact, "ms", better="lower"),
        Row(f"exact prefix cache over all hits, {name}", seconds_exact / seconds_hits, "×", reach=20.0),
        Row(f"rate of the baseline's products, {name}", 1e-12 * rate, "TFLOP/s"),
        Row(
            f"capture of one segment of {sizes.segment_tokens:,} tokens",
            1e3 * median(_seconds(captured)),
            "ms",
            None,
            "lower",
        ),
        Row("bytes of one segment state", captured[0].size_bytes / 2**20, "MiB", better="lower"),
    ]


def _seconds(captured: Sequence[CaptureEvent]) -> list[float]:
    """Of all captures but the first, which compiles."""
    return [event.seconds for event in captured[1:] or captured]


def _remember_prefix(engine: Engine, system: tuple[int, ...]) -> None:
    parts = (PromptPart(system), PromptPart((17,)))
    engine.submit(
        GenerateRequest("prefix", parts, SamplingOptions(1), lambda event: None, b"", (SnapshotOrder(_PREFIX_KEY, 1),))
    )
    while not engine.is_idle:
        engine.step()


def measure_decode(engine: Engine, sizes: Sizes, batch: int, steps: int) -> list[Row]:
    """Tokens a second of requests that share the stored documents, behind composed prompts."""
    vocabulary = engine.context.model.spec.vocab_size
    segments = [token_ids(seed, sizes.segment_tokens, vocabulary) for seed in range(sizes.segments)]
    stored = [PromptPart(ids, Serving.SEGMENT, key(index)) for index, ids in enumerate(segments)]
    stamps: list[float] = []

    def sink(event: object) -> None:
        if isinstance(event, TokenEvent):
            stamps.append(time.perf_counter())

    for number in range(batch):
        question = PromptPart(token_ids(2000 + number, _QUESTION_TOKENS, vocabulary))
        engine.submit(GenerateRequest(f"d{number}", (*stored, question), SamplingOptions(steps), sink))
    while not engine.is_idle:
        engine.step()
    last = stamps[-batch * (steps // 2) :]
    rate = (len(last) - batch) / (last[-1] - last[batch - 1])
    return [Row(f"decoding behind {sizes.prompt_tokens:,} shared tokens, batch {batch}", rate, "tokens/s")]


def measure(config: Path, sizes: Sizes, seed: int) -> list[Row]:
    """All rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = build(config, sizes, seed, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    rows: list[Row] = []
    if device.type == "cuda":
        rows.append(Row("memory behind loading", torch.cuda.memory_allocated() / 2**30, "GiB", better="lower"))
    rows += measure_first_token(engine, sizes, inspect_checkpoint(config).sizes.active_parameters)
    for batch in (1, 64):
        rows += measure_decode(engine, sizes, batch, 32)
    return rows


def main(
    out: Annotated[Path, typer.Option(help="Where to write the result file.")],
    config: Annotated[Path, typer.Option(help="Directory with the config.json of a true shape.")] = _CONFIG,
    segments: Annotated[int, typer.Option(min=1, help="Segments of one prompt.")] = 16,
    segment_tokens: Annotated[int, typer.Option(min=64, help="Tokens of each.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds behind a first one.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 1,
) -> None:
    """Measure the engine on one GPU with random weights of a true shape."""
    rows = measure(config, Sizes(segments, segment_tokens, rounds), seed)
    for row in rows:
        print(f"{row.value:12.4g} {row.unit:10} {row.measure}", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    command = (
        f"python -m bench.gpu --config {config} --segments {segments} --segment-tokens {segment_tokens} --seed {seed}"
    )
    write_results(out, command, device, rows)


if __name__ == "__main__":
    typer.run(main)
