"""Where the time of the engine's passes goes on one GPU: wall time, what the device was busy, and its busiest kernels.

`python -m bench.profile`; needs what `bench.gpu` needs. A pass whose wall time is far above its busy time waits for the host.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from bench.engine_runs import capture_together, first_tokens, key, run_until_idle
from bench.gpu.rig import Rig
from bench.gpu.sizes import TRUE
from services.worker.engine.loop import Engine
from services.worker.engine.requests import GenerateRequest, PromptPart, Serving
from services.worker.engine.sampling import SamplingOptions

_CONFIG = Path("tests/data/configs/Qwen3.5-35B-A3B")
_KERNELS_SHOWN = 20
_DECODED = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """prepare: untimed; run: what is looked at; repeats: by which its figures are divided."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    repeats: int = 1


def scenarios(rig: Rig, engine: Engine) -> list[Scenario]:
    """All-hit requests, decode steps, captures and a full recompute."""
    sizes = rig.sizes
    segments = [rig.ids(seed, sizes.segment_tokens) for seed in range(sizes.segments)]
    capture_together(engine, {key(index): ids for index, ids in enumerate(segments)})
    stored = [PromptPart(ids, Serving.SEGMENT, key(index)) for index, ids in enumerate(segments)]
    hits = (*stored, rig.question(0))
    live = (*(PromptPart(ids) for ids in segments), rig.question(0))
    return [
        Scenario("all hits", lambda: first_tokens(engine, [hits])),
        Scenario(
            "all hits, waiting together", lambda: first_tokens(engine, [hits] * sizes.waiting), repeats=sizes.waiting
        ),
        _capture(rig, engine, 1, sizes.segment_tokens),
        _capture(rig, engine, sizes.waiting, sizes.short_tokens),
        _capture(rig, engine, sizes.waiting, sizes.segment_tokens),
        Scenario("full recompute", lambda: first_tokens(engine, [live])),
        _decode(engine, hits, 1),
        _decode(engine, hits, sizes.readers),
    ]


def _decode(engine: Engine, prompt: tuple[PromptPart, ...], batch: int) -> Scenario:
    def start() -> None:
        for number in range(batch):
            sampling = SamplingOptions(_DECODED + 3)
            engine.submit(GenerateRequest(f"d{number}", prompt, sampling, lambda event: None))
        while engine.num_decoding != batch:
            engine.step()
        engine.step()

    def steps() -> None:
        for _ in range(_DECODED):
            engine.step()

    return Scenario(f"decode step, batch {batch}", steps, start, _DECODED)


def _capture(rig: Rig, engine: Engine, count: int, tokens: int) -> Scenario:
    segments = {key(100 + index): rig.ids(500 + index, tokens) for index in range(count)}

    def forget() -> None:
        for name in segments:
            engine.context.store.drop(name)

    name = f"capture of {count} segments of {tokens:,} tokens"
    return Scenario(name, lambda: capture_together(engine, segments), forget)


def report(engine: Engine, scenario: Scenario) -> None:
    """Run it three times: warm, timed, profiled."""
    for _ in range(2):
        scenario.prepare()
        torch.cuda.synchronize()
        started = time.perf_counter()
        scenario.run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
        run_until_idle(engine)
    scenario.prepare()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        scenario.run()
        torch.cuda.synchronize()
    run_until_idle(engine)
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
    sizes = replace(TRUE, segments=segments, segment_tokens=segment_tokens)
    rig = Rig(config, sizes, torch.device("cuda"), seed=1)
    tokens = 3 * sizes.prompt_tokens + sizes.readers * (sizes.question_tokens + _DECODED + 3)
    engine = rig.engine(tokens, sizes.readers * (sizes.segments + 4), sizes.readers)
    for scenario in scenarios(rig, engine):
        if only in scenario.name:
            report(engine, scenario)


if __name__ == "__main__":
    typer.run(main)
