"""Time to first token when every document is a hit, beside an exact prefix cache and beside what memory allows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.engine_runs import capture_together, first_tokens, key, named_key, remember_prefix
from bench.gpu.floors import attention_operations, plane_bytes
from bench.gpu.rig import Rig
from bench.gpu.weights import counted_experts
from bench.results import Row
from services.worker.engine.loop import Engine
from services.worker.engine.requests import PromptPart, Serving

__all__ = ["measure"]

_PREFIX_KEY = named_key("prefix")
_LONG_BASELINE_ROUNDS = 2

_Parts = tuple[PromptPart, ...]


@dataclass(frozen=True, slots=True)
class _Times:
    """Medians in seconds; touched: bytes of weights that the all-hit pass reads."""

    hits: float
    exact: float
    touched: int


def measure(rig: Rig) -> Iterator[Row]:
    """Rows of prompts of few and of many segments, and of several prompts at once."""
    sizes = rig.sizes
    longest = sizes.many_segments * sizes.segment_tokens + sizes.system_tokens
    live_runs = max(sizes.many_segments, sizes.waiting * (sizes.segments + 4))
    engine = rig.engine(2 * longest + sizes.waiting * sizes.question_tokens, 3 * live_runs + 64, sizes.waiting)
    segments = [rig.ids(seed, sizes.segment_tokens) for seed in range(sizes.many_segments)]
    capture_together(engine, {key(index): ids for index, ids in enumerate(segments)})
    remember_prefix(engine, rig.ids(99, sizes.system_tokens), _PREFIX_KEY)
    few = _time(rig, engine, segments[: sizes.segments], sizes.rounds)
    yield from _ratios(rig, few, sizes.segments, reach=20.0)
    yield from _weights_floor(rig, few)
    yield from _waiting(rig, engine, segments[: sizes.segments], few.hits)
    many = _time(rig, engine, segments, _LONG_BASELINE_ROUNDS)
    yield from _ratios(rig, many, sizes.many_segments, reach=70.0)
    yield from _whole_floor(rig, many)


def _time(rig: Rig, engine: Engine, segments: Sequence[tuple[int, ...]], baseline_rounds: int) -> _Times:
    """Both in turns, the segments in another order every time; the first turn of each compiles."""
    hits: list[float] = []
    exact: list[float] = []
    with counted_experts() as count:
        first_tokens(engine, [_prompt(rig, segments, 0, Serving.SEGMENT)], _PREFIX_KEY)
    live = len(segments) * rig.sizes.seam_window + rig.sizes.question_tokens
    touched = rig.weights.touched(count, live)
    for number in range(max(rig.sizes.rounds, baseline_rounds) + 1):
        prompt = _prompt(rig, segments, number, Serving.SEGMENT)
        hits.append(first_tokens(engine, [prompt], _PREFIX_KEY).seconds)
        if number <= baseline_rounds:
            prompt = _prompt(rig, segments, number, Serving.LIVE)
            exact.append(first_tokens(engine, [prompt], _PREFIX_KEY).seconds)
    return _Times(median(hits[1:]), median(exact[1:]), touched)


def _prompt(rig: Rig, segments: Sequence[tuple[int, ...]], number: int, serving: Serving) -> _Parts:
    """System prompt from its snapshot, segments from the `number`th on, a question of its own."""
    order = [(number + index) % len(segments) for index in range(len(segments))]
    documents = [
        PromptPart(segments[index], serving, key(index)) if serving is Serving.SEGMENT else PromptPart(segments[index])
        for index in order
    ]
    system = PromptPart(rig.ids(99, rig.sizes.system_tokens), Serving.PREFIX)
    return (system, *documents, rig.question(number))


def _ratios(rig: Rig, times: _Times, num_segments: int, reach: float) -> Iterator[Row]:
    sizes = rig.sizes
    name = f"{num_segments} segments of {sizes.segment_tokens:,} tokens"
    live = range(sizes.system_tokens, sizes.system_tokens + num_segments * sizes.segment_tokens + sizes.question_tokens)
    products = 2 * rig.weights.active_parameters * len(live)
    rate = (products + attention_operations(rig.spec, live)) / times.exact
    yield Row(f"all hits, {name}", 1e3 * times.hits, "ms", better="lower")
    yield Row(f"exact prefix cache, {name}", 1e3 * times.exact, "ms", better="lower")
    yield Row(f"exact prefix cache over all hits, {name}", times.exact / times.hits, "×", reach)
    yield Row(f"rate of the exact prefix cache's recompute, {name}", 1e-12 * rate, "TFLOP/s")
    share = 100 * rate / rig.ceilings.multiplied
    yield Row(f"the same as a share of a large bf16 product's, {name}", share, "%")


def _weights_floor(rig: Rig, times: _Times) -> Iterator[Row]:
    name = f"{rig.sizes.segments} segments"
    floor = times.touched / rig.ceilings.copied
    yield Row(f"read of the weights touched, {name}", 1e3 * floor, "ms", better="lower")
    yield Row(f"all hits over the read of the weights touched, {name}", times.hits / floor, "×", 1.8, "lower")


def _whole_floor(rig: Rig, times: _Times) -> Iterator[Row]:
    """Weights, stored states, keys and values once at the copy rate, then attention at the bf16 rate."""
    sizes, spec = rig.sizes, rig.spec
    name = f"{sizes.many_segments} segments"
    prompt = sizes.system_tokens + sizes.many_segments * sizes.segment_tokens + sizes.question_tokens
    starts = range(sizes.system_tokens, prompt - sizes.question_tokens, sizes.segment_tokens)
    live = [start + offset for start in starts for offset in range(sizes.seam_window)]
    live += range(prompt - sizes.question_tokens, prompt)
    itemsize = rig.dtype.itemsize
    states = sizes.many_segments * plane_bytes(spec, itemsize)
    read = times.touched + states + prompt * spec.token_bytes(itemsize)
    floor = read / rig.ceilings.copied + attention_operations(spec, live) / rig.ceilings.multiplied
    parts = "weights, states, keys and values read, attention computed"
    yield Row(f"{parts}, {name}", 1e3 * floor, "ms", better="lower")
    yield Row(f"all hits over that, {name}", times.hits / floor, "×", 1.8, "lower")


def _waiting(rig: Rig, engine: Engine, segments: Sequence[tuple[int, ...]], alone: float) -> Iterator[Row]:
    """Requests that wait together, until the last of them has its first token."""
    count = rig.sizes.waiting
    times = []
    for number in range(rig.sizes.rounds + 1):
        turns = range(number * count, (number + 1) * count)
        prompts = [_prompt(rig, segments, turn, Serving.SEGMENT) for turn in turns]
        times.append(first_tokens(engine, prompts, _PREFIX_KEY).seconds)
    each = median(times[1:]) / count
    name = f"{count} waiting requests of {len(segments)} segments"
    yield Row(f"time a request, {name}", 1e3 * each, "ms", better="lower")
    yield Row(f"time a request over one alone, {name}", each / alone, "×", 0.35, "lower")
