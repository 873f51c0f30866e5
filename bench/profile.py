"""Where the time of the engine's passes goes on one GPU: wall time, what the device was busy, and its busiest kernels.

`python -m bench.profile`; needs what `bench.gpu` needs. A pass whose wall time is far above its busy time waits for the host.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from bench.engine_runs import capture, generate, key, token_ids
from bench.gpu import Sizes, build
from services.worker.engine.loop import Engine
from services.worker.engine.requests import CaptureJob, CaptureSegment, GenerateRequest, PromptPart, Serving
from services.worker.engine.sampling import SamplingOptions

_CONFIG = Path("tests/data/configs/Qwen3.5-35B-A3B")
_KERNELS_SHOWN = 14
_DECODED = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """prepare: untimed; run: what is looked at; repeats: by which its figures are divided."""

    name: str
    run: Callable[[], None]
    prepare: Callable[[], None] = lambda: None
    repeats: int = 1


def scenarios(engine: Engine, sizes: Sizes) -> list[Scenario]:
    """All-hit requests, decode steps, captures and a full recompute."""
    vocabulary = engine.context.model.spec.vocab_size
    segments = [token_ids(seed, sizes.segment_tokens, vocabulary) for seed in range(sizes.segments)]
    capture(engine, segments)
    question = PromptPart(token_ids(1000, 64, vocabulary))
    stored = [PromptPart(ids, Serving.SEGMENT, key(index)) for index, ids in enumerate(segments)]
    live = tuple(PromptPart(ids) for ids in segments)

    def decode(batch: int) -> Scenario:
        def start() -> None:
            for number in range(batch):
                sampling = SamplingOptions(_DECODED + 3)
                engine.submit(GenerateRequest(f"d{number}", (*stored, question), sampling, lambda event: None))
            while engine.num_decoding != batch:
                engine.step()
            engine.step()

        def steps() -> None:
            for _ in range(_DECODED):
                engine.step()

        return Scenario(f"decode step, batch {batch}", steps, start, _DECODED)

    def recapture(count: int) -> Scenario:
        def forget() -> None:
            for index in range(100, 100 + count):
                engine.context.store.drop(key(index))

        def run() -> None:
            orders = tuple(
                CaptureSegment(key(100 + index), token_ids(500 + index, sizes.segment_tokens, vocabulary))
                for index in range(count)
            )
            engine.submit_capture(CaptureJob("profile", orders, lambda event: None))
            finish(engine)

        return Scenario(f"capture of {count} segments of {sizes.segment_tokens:,} tokens", run, forget)

    return [
        Scenario("all hits", lambda: _ignore(generate(engine, (*stored, question), 1))),
        recapture(1),
        recapture(4),
        Scenario("full recompute", lambda: _ignore(generate(engine, (*live, question), 1))),
        decode(1),
        decode(64),
    ]


def finish(engine: Engine) -> None:
    """Run until nothing is left."""
    while not engine.is_idle:
        engine.step()


def _ignore(result: object) -> None:
    del result


def report(engine: Engine, scenario: Scenario) -> None:
    """Run it three times: warm, timed, profiled."""
    for _ in range(2):
        scenario.prepare()
        torch.cuda.synchronize()
        started = time.perf_counter()
        scenario.run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
        finish(engine)
    scenario.prepare()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        scenario.run()
        torch.cuda.synchronize()
    finish(engine)
    kernels = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(event.self_device_time_total for event in kernels)
    launches = sum(event.count for event in kernels if event.self_device_time_total)
    each = scenario.repeats
    print(
        f"\n{scenario.name}: {1e3 * wall / each:.2f} ms, device busy {1e-3 * busy / each:.2f} ms, "
        f"{launches // each} kernels",
        flush=True,
    )
    for event in kernels[:_KERNELS_SHOWN]:
        milliseconds = 1e-3 * event.self_device_time_total / each
        print(f"  {milliseconds:9.3f} ms {event.count // each:6} x  {event.key[:100]}", flush=True)


def main(
    config: Annotated[Path, typer.Option(help="Directory with the config.json of a true shape.")] = _CONFIG,
    segments: Annotated[int, typer.Option(min=1, help="Segments of one prompt.")] = 16,
    segment_tokens: Annotated[int, typer.Option(min=64, help="Tokens of each.")] = 2048,
    only: Annotated[str, typer.Option(help="Scenarios whose name holds this.")] = "",
) -> None:
    """Profile the engine on one GPU with random weights of a true shape."""
    sizes = Sizes(segments, segment_tokens, 1)
    device = torch.device("cuda")
    engine = build(config, sizes, 1, device, torch.bfloat16)
    for scenario in scenarios(engine, sizes):
        if only in scenario.name:
            report(engine, scenario)


if __name__ == "__main__":
    typer.run(main)
