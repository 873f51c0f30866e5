"""What is held for what: weights, segment states, running requests, further readers, and the passes' own room."""

from collections.abc import Callable, Iterator

import torch

from bench.engine_runs import Watch, capture_together, first_tokens, key
from bench.gpu.contents import RandomStates
from bench.gpu.floors import state_bytes
from bench.gpu.rig import Rig
from bench.results import Row
from services.worker.engine.loop import Engine
from services.worker.engine.pages import pages_for
from services.worker.engine.requests import GenerateRequest, PromptPart, Serving
from services.worker.engine.sampling import SamplingOptions
from services.worker.engine.states import SegmentState

__all__ = ["measure"]

_MIB, _GIB = 1 << 20, 1 << 30
_GENERATED = 8
_KEPT = 50_000

_Parts = tuple[PromptPart, ...]


def measure(rig: Rig) -> Iterator[Row]:
    """Rows by kind; what the passes take themselves only where a device counts it."""
    sizes, itemsize = rig.sizes, rig.dtype.itemsize
    yield Row("weights", rig.weights.total / _GIB, "GiB", better="lower")
    yield Row("keys and values of one token", rig.spec.token_bytes(itemsize) / 1024, "KiB", better="lower")
    yield Row("state slot of one running request", state_bytes(rig.spec, itemsize) / _MIB, "MiB", better="lower")
    tokens = 3 * (sizes.prompt_tokens + sizes.question_tokens) + sizes.waiting * sizes.segment_tokens
    engine = rig.engine(tokens, 8 * (max(sizes.segments, sizes.waiting) + 4), 2)
    yield from _segment(rig, engine)
    states = RandomStates(engine.context)
    documents = [rig.ids(number, sizes.segment_tokens) for number in range(sizes.segments)]
    for number, ids in enumerate(documents):
        states.put_segment(key(number), ids)
    hits = tuple(PromptPart(ids, Serving.SEGMENT, key(number)) for number, ids in enumerate(documents))
    yield from _further_reader(rig, engine, hits)
    if rig.device.type == "cuda":
        yield from _workspaces(rig, engine, hits)


def _segment(rig: Rig, engine: Engine) -> Iterator[Row]:
    tokens = rig.sizes.segment_tokens
    capture_together(engine, {key(_KEPT): rig.ids(1, tokens)})
    state = engine.context.store.get(key(_KEPT))
    if not isinstance(state, SegmentState):
        raise TypeError("no segment state was captured")
    name = f"one segment state of {tokens:,} tokens"
    yield Row(name, engine.context.store.size_bytes(state) / _MIB, "MiB", better="lower")
    kinds = {
        "transitions": sum(plane.transition.nbytes for plane in state.planes),
        "end states": sum(plane.end_state.nbytes for plane in state.planes),
        "keys and values": engine.context.store.size_bytes(state) - state.plane_bytes,
    }
    for kind, held in kinds.items():
        yield Row(f"{kind} of {name}", held / _MIB, "MiB", better="lower")
    engine.context.store.drop(key(_KEPT))


def _further_reader(rig: Rig, engine: Engine, hits: _Parts) -> Iterator[Row]:
    """Pages that a second reader takes while a first one runs."""
    pages, free, watches = engine.context.pages, [], [Watch(), Watch()]
    for number, watch in enumerate(watches):
        sampling = SamplingOptions(_GENERATED)
        engine.submit(GenerateRequest(f"reader-{number}", (*hits, rig.question(number)), sampling, watch))
        while engine.num_decoding <= number:
            engine.step()
        free.append(pages.num_free)
    for number, watch in enumerate(watches):
        engine.cancel(f"reader-{number}")
        watch.check()
    taken = free[0] - free[1]
    body = rig.sizes.segment_tokens - rig.sizes.seam_window
    shared = len(hits) * pages_for(body, pages.page_size)
    live = len(hits) * rig.sizes.seam_window + rig.sizes.question_tokens + _GENERATED
    name = f"a further reader of {len(hits)} documents of {rig.sizes.segment_tokens:,} tokens"
    yield Row(f"pages of {name}, share of theirs", 100 * taken / shared, "%", 1.0, "lower")
    yield Row(f"tokens in them of {name}, share of theirs", 100 * live / (len(hits) * body), "%", better="lower")


def _workspaces(rig: Rig, engine: Engine, hits: _Parts) -> Iterator[Row]:
    """The most that a pass holds beside what is there before and after it."""
    sizes = rig.sizes
    live = tuple(PromptPart(part.token_ids) for part in hits)
    fresh = {key(_KEPT + number): rig.ids(700 + number, sizes.segment_tokens) for number in range(sizes.waiting)}
    passes: dict[str, Callable[[], object]] = {
        f"all hits of {sizes.prompt_tokens:,} tokens": lambda: first_tokens(engine, [(*hits, rig.question(1))]),
        f"capture of {sizes.waiting} x {sizes.segment_tokens:,} tokens": lambda: capture_together(engine, fresh),
        f"full recompute of {sizes.prompt_tokens:,} tokens": lambda: first_tokens(engine, [(*live, rig.question(1))]),
    }
    for name, run in passes.items():
        rig.clear()
        before = torch.cuda.memory_allocated(rig.device)
        torch.cuda.reset_peak_memory_stats(rig.device)
        run()
        peak = torch.cuda.max_memory_allocated(rig.device)
        held = max(before, torch.cuda.memory_allocated(rig.device))
        yield Row(f"own room of a pass, {name}", (peak - held) / _GIB, "GiB", better="lower")
    yield Row(
        "allocated in all, behind these passes", torch.cuda.memory_allocated(rig.device) / _GIB, "GiB", None, "lower"
    )
