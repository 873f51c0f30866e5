"""Full recompute: ours, and that of `transformers` with the public kernels in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from bench.engine_runs import first_tokens
from bench.gpu.rig import Rig
from bench.results import Row
from services.worker.engine.requests import PromptPart

__all__ = ["measure"]

_SHOWN = 2000


def measure(rig: Rig) -> Iterator[Row]:
    """Theirs first: both models together fit no device."""
    sizes = rig.sizes
    if rig.is_drawn:
        rig.release()
    public = _measure_public(rig)
    for tokens, seconds in public.seconds.items():
        yield Row(f"{public.name}, {tokens:,} tokens", 1e3 * seconds, "ms", better="lower")
    engine = rig.engine(max(sizes.recomputed), 2)
    for tokens in sizes.recomputed:
        prompts = [(PromptPart(rig.ids(number, tokens)),) for number in range(sizes.rounds + 1)]
        seconds = median([first_tokens(engine, [prompt]).seconds for prompt in prompts][1:])
        yield Row(f"ours, {tokens:,} tokens", 1e3 * seconds, "ms", better="lower")
        if tokens in public.seconds:
            reach = 1.6 if tokens == max(sizes.recomputed) else None
            yield Row(f"`transformers` over ours, {tokens:,} tokens", public.seconds[tokens] / seconds, "×", reach)


@dataclass(frozen=True, slots=True)
class _Public:
    """name: the library and what it ran on; seconds: by number of tokens."""

    name: str
    seconds: dict[int, float]


def _measure_public(rig: Rig) -> _Public:
    """Empty where the other process fails, whose words are printed: ours is still to be measured."""
    command = [sys.executable, "-m", "bench.gpu.transformers_baseline", "--config", str(rig.config)]
    command += ["--rounds", str(rig.sizes.rounds), "--device", rig.device.type, "--seed", str(rig.seed)]
    for tokens in rig.sizes.recomputed:
        command += ["--tokens", str(tokens)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        print(f"  FAILED  transformers: {finished.stderr[-_SHOWN:]}", flush=True)
        return _Public("`transformers`", {})
    found = json.loads(finished.stdout.splitlines()[-1])
    name = f"`transformers` ({found['recurrence']}, {found['attention']})"
    return _Public(name, {int(tokens): seconds for tokens, seconds in found["seconds"].items()})
