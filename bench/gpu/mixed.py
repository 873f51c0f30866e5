"""A mixed trace: which documents a cache holds comes from the trace, what such requests cost from the device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from bench.ceilings import median_seconds
from bench.engine_runs import first_tokens, key, named_key, remember_prefix
from bench.gpu.contents import RandomStates
from bench.gpu.floors import plane_bytes, state_bytes
from bench.gpu.rig import Rig
from bench.gpu.trace import Trace, chain_hits, document_hits, draw_trace
from bench.results import Row
from services.worker.engine.loop import Engine
from services.worker.engine.requests import PromptPart, Serving

__all__ = ["measure", "spread"]

_PREFIX_KEY, _CHAIN_KEY = named_key("prefix"), named_key("chain")
# Requests before the caches are as they stay, and requests that are looked at, a document.
_WARM, _WINDOW = 4, 2
# Of the device's memory, for what runs.
_RESERVED_SHARE = 0.1
_SETTINGS = ((0.3, 3.8), (0.6, 6.5), (0.8, 9.0))


@dataclass(frozen=True, slots=True)
class _Caches:
    """What both caches hold, request by request behind the warm-up, at one capacity.

    requests; hits: documents held; on_device: those among them that the device's memory holds; leading: documents that the
    baseline holds, a snapshot behind every document of a prompt.
    """

    requests: Sequence[tuple[int, ...]]
    hits: Sequence[frozenset[int]]
    on_device: Sequence[frozenset[int]]
    leading: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes a document, in our cache and in the baseline's."""

    segments: Sequence[int]
    links: Sequence[int]


class _Costs:
    """Seconds of a request whose documents are held or not. Held states are random numbers, cold ones are captured."""

    def __init__(self, rig: Rig, lengths: Sequence[int]) -> None:
        sizes = rig.sizes
        tokens = 2 * sizes.distinct * sizes.longest + 2 * sizes.system_tokens + sizes.question_tokens
        self._rig, self._lengths = rig, lengths
        self._engine: Engine = rig.engine(tokens, 4 * (sizes.distinct + 4))
        self._states = RandomStates(self._engine.context, sizes.distinct)
        self._system = rig.ids(99, sizes.system_tokens)
        remember_prefix(self._engine, self._system, _PREFIX_KEY)

    def ours(self, request: Sequence[int], hits: frozenset[int]) -> float:
        """Cold documents are captured as everything is composed."""
        for document in hits:
            self._states.put_segment(key(document), self._ids(document))
        parts = [
            PromptPart(self._ids(document), Serving.SEGMENT, key(document), captures=document not in hits)
            for document in request
        ]
        prompt = (PromptPart(self._system, Serving.PREFIX), *parts, self._rig.question(request[0]))
        seconds = first_tokens(self._engine, [prompt], _PREFIX_KEY).seconds
        self._states.drop(key(document) for document in request)
        return seconds

    def baseline(self, request: Sequence[int], leading: int) -> float:
        """The system prompt and leading documents from a snapshot, the rest recomputed."""
        documents = [self._ids(document) for document in request]
        held = [PromptPart(ids, Serving.PREFIX) for ids in (self._system, *documents[:leading])]
        name = _PREFIX_KEY
        if leading:
            name = _CHAIN_KEY
            self._states.put_prefix(name, tuple(token for part in held for token in part.token_ids))
        prompt = (*held, *(PromptPart(ids) for ids in documents[leading:]), self._rig.question(request[0]))
        seconds = first_tokens(self._engine, [prompt], name).seconds
        self._states.drop([_CHAIN_KEY])
        return seconds

    def _ids(self, document: int) -> tuple[int, ...]:
        return self._rig.ids(document, self._lengths[document])


def measure(rig: Rig) -> Iterator[Row]:
    """One group of rows for each share of the trace's tokens that our cache holds."""
    sizes = rig.sizes
    requests = (_WARM + _WINDOW) * sizes.documents
    trace = draw_trace(sizes.documents, (sizes.shortest, sizes.longest), sizes.distinct, requests, rig.seed)
    bytes_of = _sizes(rig, trace)
    costs = _Costs(rig, trace.lengths)
    rate = _host_rate(rig.device)
    for share, reach in _SETTINGS:
        caches = _replay(rig, trace, bytes_of, int(share * sum(bytes_of.segments)))
        yield from _rows(
            rig, trace, bytes_of, caches, costs, _Setting(f"cache of {share:.0%} of the tokens", reach, rate)
        )


@dataclass(frozen=True, slots=True)
class _Setting:
    """name; reach of the ratio; host_rate: bytes a second from host memory."""

    name: str
    reach: float
    host_rate: float


def _rows(rig: Rig, trace: Trace, bytes_of: _Sizes, caches: _Caches, costs: _Costs, setting: _Setting) -> Iterator[Row]:
    cold = [
        sum(trace.lengths[document] for document in request if document not in hits)
        for request, hits in zip(caches.requests, caches.hits, strict=True)
    ]
    recomputed = [
        sum(trace.lengths[document] for document in request[leading:])
        for request, leading in zip(caches.requests, caches.leading, strict=True)
    ]
    tokens = sum(trace.lengths[document] for request in caches.requests for document in request)
    ours = _mean_cost(cold, rig.sizes.sampled, lambda at: costs.ours(caches.requests[at], caches.hits[at]))
    exact = _mean_cost(
        recomputed, rig.sizes.sampled, lambda at: costs.baseline(caches.requests[at], caches.leading[at])
    )
    elsewhere = [
        sum(bytes_of.segments[document] for document in hits - near)
        for hits, near in zip(caches.hits, caches.on_device, strict=True)
    ]
    copied = mean(elsewhere) / setting.host_rate
    name = setting.name
    yield Row(f"cold tokens, {name}", 100 * sum(cold) / tokens, "%", better="lower")
    yield Row(
        f"recomputed tokens of the exact prefix cache, {name}", 100 * sum(recomputed) / tokens, "%", better="lower"
    )
    yield Row(f"mean time to first token, {name}", 1e3 * ours, "ms", better="lower")
    yield Row(f"mean copy of hits that the device does not hold, {name}", 1e3 * copied, "ms", better="lower")
    yield Row(f"mean time to first token of the exact prefix cache, {name}", 1e3 * exact, "ms", better="lower")
    ratio = exact / (ours + copied)
    yield Row(f"exact prefix cache over ours with that copy, {name}", ratio, "×", setting.reach)


def _sizes(rig: Rig, trace: Trace) -> _Sizes:
    itemsize = rig.dtype.itemsize
    token = rig.spec.token_bytes(itemsize)
    planes, states = plane_bytes(rig.spec, itemsize), state_bytes(rig.spec, itemsize)
    return _Sizes(
        segments=[planes + token * length for length in trace.lengths],
        links=[states + token * length for length in trace.lengths],
    )


def _replay(rig: Rig, trace: Trace, bytes_of: _Sizes, capacity: int) -> _Caches:
    first = _WARM * rig.sizes.documents
    near = capacity
    if rig.device.type == "cuda":
        memory = torch.cuda.get_device_properties(rig.device).total_memory
        near = min(capacity, int((1 - _RESERVED_SHARE) * memory) - rig.weights.total)
    return _Caches(
        trace.requests[first:],
        document_hits(trace, bytes_of.segments, capacity)[first:],
        document_hits(trace, bytes_of.segments, near)[first:],
        chain_hits(trace, bytes_of.links, capacity)[first:],
    )


def _mean_cost(amounts: Sequence[int], sampled: int, cost: Callable[[int], float]) -> float:
    """The mean over a sample that is spread over the amounts of work.

    All of it runs twice before: what its sizes need is compiled then, and passes are recorded when they are met again.
    """
    chosen = spread(amounts, sampled)
    for _ in range(2):
        for index in chosen:
            cost(index)
    return mean(cost(index) for index in chosen)


def spread(amounts: Sequence[int], count: int) -> list[int]:
    """Indices of `count` amounts, one from the middle of each of as many equal shares of them by size."""
    order = sorted(range(len(amounts)), key=lambda index: amounts[index])
    return [order[(2 * share + 1) * len(order) // (2 * count)] for share in range(count)]


def _host_rate(device: torch.device) -> float:
    """Bytes a second from pinned host memory to the device."""
    values = 1 << 28 if device.type == "cuda" else 1 << 20
    source = torch.zeros(values, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return source.nbytes / median_seconds(lambda: target.copy_(source, non_blocking=True), device)
