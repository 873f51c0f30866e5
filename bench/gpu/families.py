"""Other true shapes on the same card: all hits against a full recompute, and what a segment takes."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from bench.engine_runs import capture_together, first_tokens, key
from bench.gpu.floors import plane_bytes
from bench.gpu.gate import measure_agreement
from bench.gpu.rig import Rig
from bench.results import Row
from services.worker.engine.requests import PromptPart, Serving

__all__ = ["measure", "measure_shape"]

_NAMES = ("Kimi-Linear-48B-A3B", "Ring-mini-linear-2.0")
# A first time compiles, and a pass is recorded when it is met again.
_WARM, _ROUNDS = 2, 2


def measure(rig: Rig) -> Iterator[Row]:
    """The rig's own shape, then the shapes that stand beside its config; each model leaves the device before the next."""
    yield from measure_shape(rig, rig.config.name)
    rig.release()
    for name in _NAMES:
        config = rig.config.parent / name
        if config.is_dir():
            other = Rig(config, rig.sizes, rig.device, rig.seed)
            try:
                yield from measure_shape(other, name)
            except Exception as error:  # whatever one shape dies of, the others are still to be measured
                print(f"  FAILED  {name}: {type(error).__name__}: {error}", flush=True)
            other.release()


def measure_shape(rig: Rig, name: str) -> Iterator[Row]:
    """One shape's rows, named by it; bytes are those of one rank where several hold it.

    Raises:
        RuntimeError: composed prompts do not say what a recompute says.
    """
    sizes = rig.sizes
    yield Row(f"{name} / weights, GiB", rig.weights.total / 2**30, "GiB", better="lower")
    held = plane_bytes(rig.own_spec, rig.dtype.itemsize)
    held += (sizes.segment_tokens - sizes.seam_window) * rig.own_spec.token_bytes(rig.dtype.itemsize)
    yield Row(f"{name} / a segment, MiB", held / 2**20, "MiB", better="lower")
    agreement = measure_agreement(rig)
    yield Row(f"{name} / error of the gate's logits", agreement.composed, "", better="lower")
    if not agreement.is_good:
        raise RuntimeError(f"{agreement}: this run measures nothing")
    engine = rig.engine(2 * sizes.prompt_tokens + sizes.question_tokens, 3 * sizes.segments + 8)
    segments = [rig.ids(number, sizes.segment_tokens) for number in range(sizes.segments)]
    capture_together(engine, {key(number): ids for number, ids in enumerate(segments)})
    hits = tuple(PromptPart(ids, Serving.SEGMENT, key(number)) for number, ids in enumerate(segments))
    live = tuple(replace(part, serving=Serving.LIVE, key=b"") for part in hits)
    seconds = []
    for parts, column in ((hits, "all hits, ms"), (live, "full recompute, ms")):
        prompts = [(*parts, rig.question(number)) for number in range(_ROUNDS + _WARM)]
        seconds.append(median([first_tokens(engine, [prompt]).seconds for prompt in prompts][_WARM:]))
        yield Row(f"{name} / {column}", 1e3 * seconds[-1], "ms", better="lower")
    yield Row(f"{name} / recompute over all hits, ×", seconds[1] / seconds[0], "×")
