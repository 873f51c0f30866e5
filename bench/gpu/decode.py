"""Decoding against what memory allows: private contexts, and readers of the same documents. Contexts are random numbers."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.engine_runs import Watch, key, synchronise
from bench.gpu.contents import RandomStates
from bench.gpu.floors import state_bytes
from bench.gpu.rig import Rig
from bench.gpu.weights import counted_experts
from bench.results import Row
from services.worker.engine.loop import Engine
from services.worker.engine.requests import GenerateRequest, PromptPart, Serving
from services.worker.engine.sampling import SamplingOptions

__all__ = ["measure"]

_WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a batch: median seconds, and the bytes of weights that it reads."""

    seconds: float
    touched: int


def measure(rig: Rig) -> Iterator[Row]:
    """One request and many, each over a context of its own; then as many over the same documents."""
    yield from _private(rig)
    rig.clear()
    yield from _shared(rig)


def _private(rig: Rig) -> Iterator[Row]:
    sizes = rig.sizes
    engine = _engine(rig, sizes.readers)
    states, context = RandomStates(engine.context), rig.ids(0, sizes.prompt_tokens)
    for reader in range(sizes.readers):
        states.put_segment(key(reader), context)
    contexts = [(PromptPart(context, Serving.SEGMENT, key(reader)),) for reader in range(sizes.readers)]
    for batch, reach in ((1, 0.35), (sizes.readers, 0.5)):
        name = f"{batch} private contexts of {sizes.prompt_tokens:,} tokens"
        yield from _rows(rig, _time(rig, engine, contexts[:batch]), batch, batch, name, reach)


def _shared(rig: Rig) -> Iterator[Row]:
    """With an engine of its own: recorded steps hide which experts they touch."""
    sizes = rig.sizes
    engine = _engine(rig, 1)
    states = RandomStates(engine.context)
    documents = [rig.ids(number, sizes.segment_tokens) for number in range(sizes.segments)]
    for number, ids in enumerate(documents):
        states.put_segment(key(number), ids)
    shared = tuple(PromptPart(ids, Serving.SEGMENT, key(number)) for number, ids in enumerate(documents))
    name = f"{sizes.readers} readers of the same {sizes.prompt_tokens:,} tokens"
    yield from _rows(rig, _time(rig, engine, [shared] * sizes.readers), sizes.readers, 1, name, None)


def _engine(rig: Rig, contexts: int) -> Engine:
    """With room for so many stored contexts, and for what all readers have live."""
    sizes = rig.sizes
    live = sizes.question_tokens + sizes.segments * sizes.seam_window + sizes.decode_steps + _WARM_STEPS + 2
    tokens = contexts * sizes.prompt_tokens + sizes.readers * live
    return rig.engine(tokens, sizes.readers * (sizes.segments + 4) + sizes.segments, sizes.readers)


def _time(rig: Rig, engine: Engine, contexts: Sequence[tuple[PromptPart, ...]]) -> _Step:
    steps = rig.sizes.decode_steps
    watches = [Watch() for _ in contexts]
    for number, (parts, watch) in enumerate(zip(contexts, watches, strict=True)):
        sampling = SamplingOptions(steps + _WARM_STEPS + 2)
        engine.submit(GenerateRequest(f"decode-{number}", (*parts, rig.question(number)), sampling, watch))
    while engine.num_decoding < len(contexts):
        engine.step()
    with counted_experts() as count:
        engine.step()
    for _ in range(_WARM_STEPS - 1):
        engine.step()
    times = []
    for _ in range(steps):
        synchronise(engine)
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    for number, watch in enumerate(watches):
        engine.cancel(f"decode-{number}")
        watch.check()
    return _Step(median(times), rig.weights.touched(count, len(contexts)))


def _rows(rig: Rig, step: _Step, batch: int, contexts: int, name: str, reach: float | None) -> Iterator[Row]:
    """contexts: how many of them lie in memory, each of which is read once a step."""
    itemsize = rig.dtype.itemsize
    cached = contexts * rig.sizes.prompt_tokens * rig.spec.token_bytes(itemsize)
    moved = step.touched + 2 * batch * state_bytes(rig.spec, itemsize) + cached
    floor = moved / rig.ceilings.copied
    yield Row(f"{name}", batch / step.seconds, "tokens/s")
    yield Row(f"a step, {name}", 1e3 * step.seconds, "ms", better="lower")
    yield Row(f"weights touched, states and contexts moved, {name}", 1e3 * floor, "ms", better="lower")
    yield Row(f"share of the bandwidth floor, {name}", floor / step.seconds, "", reach)
