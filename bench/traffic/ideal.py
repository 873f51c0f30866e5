"""What a list of requests is like, counted out: lengths, popularity, and what caches without bounds would reuse of it."""

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.traffic.stream import Piece, TrafficRequest

__all__ = [
    "IdealReuse",
    "WorkloadFigures",
    "figures_of",
    "ideal_reuse",
    "least_recently_used_hits",
    "optimal_hits",
    "zipf_slope",
]


@dataclass(frozen=True, slots=True)
class IdealReuse:
    """Shares of all prompt tokens. prefix: in runs from the start that an earlier request of the tenant began with; anywhere:
    in pieces that an earlier request of the tenant had.
    """

    prefix: float
    anywhere: float


@dataclass(frozen=True, slots=True)
class WorkloadFigures:
    """shares: of prompt tokens, by kind; documents_used: different ones; slope: of document uses over ranks, as logarithms."""

    requests: int
    prompt_mean: float
    prompt_p50: int
    prompt_p99: int
    answer_mean: float
    shares: dict[str, float]
    documents_per_request: float
    documents_used: int
    slope: float
    reuse: IdealReuse


def figures_of(requests: Sequence[TrafficRequest]) -> WorkloadFigures:
    """All of it; of at least one request."""
    lengths = sorted(request.prompt_tokens for request in requests)
    shares: Counter[str] = Counter()
    for request in requests:
        shares["system"] += _tokens(request.system)
        *earlier, last = request.turns
        for turn in earlier:
            shares["documents"] += _tokens(turn.documents)
            shares["history"] += turn.question.tokens + turn.reply.tokens
        shares["documents"] += _tokens(last.documents)
        shares["question"] += last.question.tokens
    uses = _document_uses(requests)
    return WorkloadFigures(
        requests=len(requests),
        prompt_mean=fmean(lengths),
        prompt_p50=lengths[len(lengths) // 2],
        prompt_p99=lengths[math.ceil(0.99 * len(lengths)) - 1],
        answer_mean=fmean(request.answer_tokens for request in requests),
        shares={kind: tokens / sum(lengths) for kind, tokens in shares.items()},
        documents_per_request=sum(uses.values()) / len(requests),
        documents_used=len(uses),
        slope=zipf_slope(uses),
        reuse=ideal_reuse(requests),
    )


def ideal_reuse(requests: Sequence[TrafficRequest]) -> IdealReuse:
    """What nothing is ever forgotten for, by looking at every piece of every request."""
    runs: set[tuple[object, ...]] = set()
    seen: set[tuple[str, str, int]] = set()
    prefix = anywhere = total = 0
    for request in requests:
        run: tuple[object, ...] = (request.tenant,)
        found = []
        for piece in request.pieces:
            run = (hash(run), piece.name, piece.version)
            key = (request.tenant, piece.name, piece.version)
            prefix += piece.tokens if run in runs else 0
            anywhere += piece.tokens if key in seen else 0
            total += piece.tokens
            found.append((run, key))
        runs.update(run for run, _ in found)
        seen.update(key for _, key in found)
    return IdealReuse(prefix / total, anywhere / total)


def least_recently_used_hits(requests: Sequence[TrafficRequest], room: int) -> float:
    """Of the documents asked for, the share that a cache of the `room` last used ones has."""
    held: OrderedDict[tuple[str, str, int], None] = OrderedDict()
    hits = asked = 0
    for request in requests:
        for piece in request.turns[-1].documents:
            key = (request.tenant, piece.name, piece.version)
            hits += key in held
            asked += 1
            held[key] = None
            held.move_to_end(key)
            if len(held) > room:
                held.popitem(last=False)
    return hits / asked if asked else 0.0


def optimal_hits(requests: Sequence[TrafficRequest], room: int, first: int = 0) -> float:
    """Of the tokens of documents that requests from the `first` on ask for, the share that a cache of `room` documents has at
    most: one that knows what is to come and drops what is asked for last (Belady, 1966), documents taken as equally large.
    """
    uses = [
        ((own.tenant, piece.name, piece.version), piece.tokens if index >= first else 0)
        for index, own in enumerate(requests)
        for piece in own.turns[-1].documents
    ]
    total = sum(tokens for _, tokens in uses)
    later: dict[tuple[str, str, int], int] = {}
    follows = [0] * len(uses)
    for place in range(len(uses) - 1, -1, -1):
        follows[place] = later.get(uses[place][0], len(uses))
        later[uses[place][0]] = place
    held: dict[tuple[str, str, int], int] = {}
    hits = 0
    for (key, tokens), follow in zip(uses, follows, strict=True):
        hits += tokens if key in held else 0
        held[key] = follow
        if len(held) > room:
            del held[max(held, key=held.__getitem__)]
    return hits / total if total else 0.0


def zipf_slope(uses: "Counter[str]") -> float:
    """Least squares of log uses over log rank, over all documents that were used more than once."""
    kept = sorted((count for count in uses.values() if count > 1), reverse=True)
    if len(kept) < 2:
        return 0.0
    points = [(math.log(rank), math.log(count)) for rank, count in enumerate(kept, 1)]
    middle, level = fmean(x for x, _ in points), fmean(y for _, y in points)
    return sum((x - middle) * (y - level) for x, y in points) / sum((x - middle) ** 2 for x, _ in points)


def _document_uses(requests: Sequence[TrafficRequest]) -> "Counter[str]":
    return Counter(piece.name for request in requests for turn in request.turns[-1:] for piece in turn.documents)


def _tokens(pieces: Sequence[Piece]) -> int:
    return sum(piece.tokens for piece in pieces)
