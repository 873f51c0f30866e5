"""Costs of one NVIDIA H200 with Qwen3.5-35B-A3B's shape, out of the figures in bench/results/gpu.json.

Captures are the measured passes of 512, 2,048, 8,192 and 32,768 tokens. A live token is what 7,680 tokens more add to a full
recompute; a composed segment is what 48 more add to an all-hit prompt, less their seam windows; the pass is what is then
left of the prompt of 16. That line foretells figures which it was not made from: see `foretold`.
"""

from dataclasses import dataclass

from bench.gpu.sizes import TRUE
from bench.results import ResultFile
from services.simulator.costs import CaptureCosts, CombineCosts, Costs, StateCosts, WayCosts

__all__ = ["Foretold", "derive_costs", "foretold"]

_LAYERS = 40
_KIB, _MIB = 1 << 10, 1 << 20
# The worker's defaults on a GPU.
_PASS_TOKENS, _SWEEP_TOKENS, _MIN_BODY = 4096, 2048, 16
# From pinned host memory to the card: mean bytes of the mixed trace's hits beyond the card's memory over the copy that gpu.json
# gives for them; its two shares agree within 0.03 %.
_HOST_BYTES_PER_SECOND = 55.4e9


@dataclass(frozen=True, slots=True)
class Foretold:
    """A figure that the costs were not made from, in seconds."""

    name: str
    measured: float
    by_costs: float


def derive_costs(result: ResultFile, other_host: WayCosts) -> Costs:
    """The costs, with a way to other hosts that is measured elsewhere."""
    milliseconds = {row.measure: row.value for row in result.rows}
    long, short = (_recompute(milliseconds, tokens) for tokens in (8192, 512))
    token = (long - short) / (8192 - 512)
    few, many = (_hits(milliseconds, count) for count in (TRUE.segments, TRUE.many_segments))
    further = TRUE.many_segments - TRUE.segments
    segment = (many - few) / further - TRUE.seam_window * token
    live = TRUE.segments * TRUE.seam_window + TRUE.question_tokens
    token_bytes = int(milliseconds["memory: keys and values of one token"] * _KIB)
    state_bytes = milliseconds["memory: one segment state of 2,048 tokens"] * _MIB
    return Costs(
        name="NVIDIA H200, Qwen3.5-35B-A3B in bf16, states in fp32",
        source=_source(result),
        layers=_LAYERS,
        workers_per_host=8,
        capture=CaptureCosts(_capture_points(milliseconds), _PASS_TOKENS, _PASS_TOKENS),
        combine=CombineCosts(few - TRUE.segments * segment - live * token, segment, token, _SWEEP_TOKENS),
        state=StateCosts(
            segment_bytes=int(state_bytes - token_bytes * (2048 - TRUE.seam_window)),
            token_bytes=token_bytes,
            seam_window=TRUE.seam_window,
            seam_share=0.0,
            seam_window_max=TRUE.seam_window,
            min_tokens=TRUE.seam_window + _MIN_BODY,
        ),
        same_host=WayCosts(0.001, _HOST_BYTES_PER_SECOND),
        other_host=other_host,
    )


def foretold(result: ResultFile, costs: Costs) -> list[Foretold]:
    """Measured figures beside what the costs say of them."""
    milliseconds = {row.measure: row.value for row in result.rows}
    count, combine = TRUE.waiting, costs.combine
    live = TRUE.segments * TRUE.seam_window + TRUE.question_tokens
    waiting = milliseconds[f"ttft: time a request, {count} waiting requests of {TRUE.segments} segments"]
    together = combine.pass_seconds + count * (costs.combine_seconds(TRUE.segments, live) - combine.pass_seconds)
    return [
        *(
            Foretold(
                f"full recompute of {tokens:,} tokens",
                _recompute(milliseconds, tokens),
                costs.combine_seconds(0, tokens),
            )
            for tokens in TRUE.recomputed
        ),
        Foretold(f"{count} waiting requests of {TRUE.segments} segments", 1e-3 * count * waiting, together),
    ]


def _source(result: ResultFile) -> str:
    return (
        f"bench/results/gpu.json ({result.device}, {result.date}, commit {result.commit}), by `python -m bench.cluster h200`: "
        "captures are its passes, none slower than a longer one; a live token the slope of its full recomputes of 512 and "
        "8,192 tokens, a segment the slope of its all-hit prompts of 16 and 64 segments, the pass what is left of the first. "
        "same_host: through pinned host memory, at the rate of its copies from there to the card. other_host: a gRPC stream "
        "between two processes, measured on loopback. The latency of same_host and workers_per_host are assumed."
    )


def _capture_points(milliseconds: dict[str, float]) -> tuple[tuple[float, float], ...]:
    """Fewer tokens never take longer than more: short passes wait for the host, whose time varies."""
    sizes = [(count, tokens) for count in (1, TRUE.waiting) for tokens in (TRUE.short_tokens, TRUE.segment_tokens)]
    taken = [milliseconds[f"capture: capture, {count} x {tokens:,} tokens"] for count, tokens in sizes]
    return tuple((float(count * tokens), 1e-3 * min(taken[place:])) for place, (count, tokens) in enumerate(sizes))


def _recompute(milliseconds: dict[str, float], tokens: int) -> float:
    return 1e-3 * milliseconds[f"recompute: ours, {tokens:,} tokens"]


def _hits(milliseconds: dict[str, float], count: int) -> float:
    return 1e-3 * milliseconds[f"ttft: all hits, {count} segments of {TRUE.segment_tokens:,} tokens"]
