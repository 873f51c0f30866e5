"""First tokens of cold requests on virtual workers, with the shipped costs of an H200; and what shares of workers do."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.results import Row
from services.cache.traces import TracePart, TraceRequest
from services.simulator.cluster import FanOut, Order, Setting, simulate
from services.simulator.costs import SHIPPED, Costs, read_costs
from services.simulator.report import Report, report
from services.simulator.workload import read_arrivals

__all__ = ["EIGHT", "H200", "cold_request", "measure_fairness", "measure_simulated", "random_lengths"]

H200 = SHIPPED / "h200-qwen3.5-35b-a3b.toml"
EIGHT = (6144, 5120, 5120, 4096, 4096, 3072, 3072, 2048)
_QUESTION_TOKENS = 64
_SEEDS = range(1, 6)
_WORKERS = 8


@dataclass(frozen=True, slots=True)
class _Variant:
    """Other circumstances than layers that stream between workers of one host."""

    name: str
    setting: Setting
    costs: Costs


def cold_request(lengths: Sequence[int], time: float = 0.0, first_id: int = 0) -> TraceRequest:
    """Segments that nobody has captured, and a question."""
    segments = [TracePart(str(first_id + index), tokens) for index, tokens in enumerate(lengths)]
    return TraceRequest(time, "", (*segments, TracePart("", _QUESTION_TOKENS)))


def random_lengths(seed: int, count: int = 32) -> list[int]:
    """Of 1k to 8k tokens."""
    source = random.Random(seed)
    return [source.randint(1024, 8192) for _ in range(count)]


def measure_simulated() -> Iterator[Row]:
    """One request on idle workers, in several circumstances."""
    costs = read_costs(H200)
    streamed, whole = Setting(1), Setting(1, is_pipelined=False)
    yield from _eight_rows(costs)
    name = f"{_WORKERS} workers over one, 32 segments of 1k to 8k, least of {len(_SEEDS)} draws"
    variants = (
        _Variant("", streamed, costs),
        _Variant(", whole states", whole, costs),
        _Variant(", in turn (round robin)", replace(streamed, order=Order.ROUND_ROBIN), costs),
        _Variant(", passes of up to 32,768 tokens", streamed, _with_long_passes(costs)),
        _Variant(", every worker on a host of its own", streamed, replace(costs, workers_per_host=1)),
    )
    for variant in variants:
        ratio = min(_faster(random_lengths(seed), variant, _WORKERS) for seed in _SEEDS)
        yield Row(f"{name}{variant.name}", ratio, "×", None if variant.name else 6.0)


def _eight_rows(costs: Costs) -> Iterator[Row]:
    name = "8 segments of 2,048 to 6,144 tokens"
    for workers in (1, 2, 4, 8):
        seconds = _first_token(EIGHT, costs, Setting(workers))
        yield Row(
            f"time to first token, {name}, {workers} worker{'s' * (workers > 1)}", 1e3 * seconds, "ms", better="lower"
        )
    serial = _first_token(EIGHT, costs, Setting(1))
    yield Row(f"one worker over (longest capture + combine), {name}", serial / _critical(costs), "×")
    variants = (
        _Variant("", Setting(1), costs),
        _Variant(", whole states", Setting(1, is_pipelined=False), costs),
        _Variant(", passes of up to 32,768 tokens", Setting(1), _with_long_passes(costs)),
        _Variant(", every worker on a host of its own", Setting(1), replace(costs, workers_per_host=1)),
    )
    for variant in variants:
        seconds = _first_token(EIGHT, variant.costs, replace(variant.setting, num_workers=_WORKERS))
        measure = f"{_WORKERS} workers' share of that, {name}{variant.name}"
        yield Row(measure, _critical(variant.costs) / seconds, "×", None if variant.name else 0.85)


def measure_fairness(num_requests: int = 2000) -> Iterator[Row]:
    """Requests of 1 to 4 cold segments, every tenth of 32, at a rate that keeps most workers busy."""
    source = random.Random(2)
    trace: list[TraceRequest] = []
    time, named = 0.0, 0
    for _ in range(num_requests):
        time += source.expovariate(8)
        count = 32 if source.random() < 0.1 else source.randint(1, 4)
        trace.append(cold_request([source.randint(1024, 8192) for _ in range(count)], time, named))
        named += count
    costs = read_costs(H200)
    arrivals = list(read_arrivals(trace, costs, 1.0))
    name = f"{_WORKERS} workers, 8 requests a second, every tenth of 32 segments"
    for fan_out, words in ((FanOut.SHARED, "a share each"), (FanOut.ALL, "all for each")):
        setting = Setting(_WORKERS, fan_out=fan_out)
        yield from _load_rows(report(simulate(arrivals, costs, setting), setting), f"{name}, {words}")


def _load_rows(found: Report, name: str) -> Iterator[Row]:
    yield Row(f"Jain's index of slowdowns, {name}", found.fairness, "")
    yield Row(f"slowdown, mean, {name}", found.mean_slowdown, "×", better="lower")
    yield Row(f"slowdown, worst, {name}", found.max_slowdown, "×", better="lower")
    yield Row(f"time to first token, p50, {name}", 1e3 * found.p50_seconds, "ms", better="lower")
    yield Row(f"time to first token, p99, {name}", 1e3 * found.p99_seconds, "ms", better="lower")
    yield Row(f"utilisation, {name}", 100 * found.utilisation, "%")


def _first_token(lengths: Sequence[int], costs: Costs, setting: Setting) -> float:
    arrivals = read_arrivals([cold_request(lengths)], costs, 1.0)
    return simulate(arrivals, costs, setting).served[0].first_token_seconds


def _faster(lengths: Sequence[int], variant: _Variant, num_workers: int) -> float:
    one, many = (
        _first_token(lengths, variant.costs, replace(variant.setting, num_workers=count)) for count in (1, num_workers)
    )
    return one / many


def _critical(costs: Costs) -> float:
    """The longest capture, then the combine."""
    live = sum(map(costs.state.seam, EIGHT)) + _QUESTION_TOKENS
    return max(map(costs.capture_seconds, EIGHT)) + costs.combine_seconds(len(EIGHT), live)


def _with_long_passes(costs: Costs) -> Costs:
    return replace(costs, capture=replace(costs.capture, pass_tokens=1 << 15, chunk_tokens=1 << 15))
