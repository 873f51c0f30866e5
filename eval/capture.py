"""Segment states for every seam window at once: segments run in intervals between marks, and intervals compose.

The keys and values of a segment do not depend on its seam window, and the transition of a body is the product of its
intervals' transitions (design §3). One capture therefore serves all settings that share a prime.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence

from eval.rig import PAGE_TOKENS, Rig
from services.blob.encodings import StateEncoding
from services.worker.engine.seam import SeamWindow
from services.worker.engine.states import page_rows
from services.worker.mixers.batch import CaptureBatch, LinearCarry, LinearPlane, LinearSnapshot
from services.worker.ops.layout import PartWalk
from services.worker.ops.paged_attention import PagedQueries, PageRow, PageTable

__all__ = ["MIN_BODY", "CapturePlan", "CapturedSegment", "PrimeState", "body_end", "capture_segments", "page_end"]

# Shorter bodies are served live, as the engine's policy does on a CPU.
MIN_BODY = 16

Planes = tuple[LinearPlane, ...]


@dataclass(frozen=True, slots=True)
class PrimeState:
    """The exact state after a prime: one snapshot a linear layer, and the rows of its pages counted from 0."""

    num_tokens: int
    snapshots: tuple[LinearSnapshot, ...]
    rows: tuple[PageRow, ...]


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """Which bodies are wanted: from each seam window to the segment's end, or to a mark before its last tokens."""

    seam_windows: tuple[SeamWindow, ...]
    tail_tokens: tuple[int, ...] = ()

    def marks(self, length: int) -> tuple[int, ...]:
        """Where the intervals of a segment begin and end."""
        windows = {window.tokens(length) for window in self.seam_windows}
        seams = {seam for seam in {0} | windows if length - seam >= MIN_BODY}
        ends = {body_end(length, tail) for tail in self.tail_tokens}
        return tuple(sorted(seams | {end for end in ends if end > 0} | {length}))


def body_end(length: int, tail: int) -> int:
    """Where a body ends that leaves at least `tail` tokens behind it; a page ends there too."""
    return length if not tail else (length - tail) // PAGE_TOKENS * PAGE_TOKENS


def page_end(place: int) -> int:
    """The end of the page that holds a place of a segment."""
    return (place // PAGE_TOKENS + 1) * PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class CapturedSegment:
    """One segment under one prime. planes: by `(begin, end)` of the body, one a linear layer.

    heads: by a body's begin, where no page begins, the page that holds a copy of its tokens up to where the next one does.
    """

    token_ids: tuple[int, ...]
    pages: range
    heads: Mapping[int, int]
    planes: Mapping[tuple[int, int], Planes]

    def stored_as(self, encoding: StateEncoding) -> "CapturedSegment":
        """The segment as an encoding gives it back."""
        planes = {body: tuple(plane.stored_as(encoding) for plane in own) for body, own in self.planes.items()}
        return replace(self, planes=planes)


@dataclass(slots=True)
class _Running:
    """One segment on its way. carries: one a linear layer, of the running interval."""

    token_ids: tuple[int, ...]
    pages: range
    table: PageTable
    marks: tuple[int, ...]
    carries: list[LinearCarry]
    write_slots: range


@dataclass(frozen=True, slots=True)
class _Interval:
    """One interval of several segments: transitions `[n, H, K, K]`, end_states `[n, H, K, V]`, tails, a linear layer each."""

    rows: tuple[int, ...]
    transitions: tuple[torch.Tensor, ...]
    end_states: tuple[torch.Tensor, ...]
    tails: tuple[torch.Tensor, ...]


def capture_segments(
    rig: Rig, segments: Sequence[tuple[int, ...]], primes: Sequence[PrimeState | None], plan: CapturePlan
) -> list[CapturedSegment]:
    """Every segment after its own prime, all in one packed pass an interval."""
    start = max((prime.num_tokens for prime in primes if prime is not None), default=0)
    running = [_begin(rig, ids, prime, start, plan) for ids, prime in zip(segments, primes, strict=True)]
    log_decays: list[list[list[torch.Tensor]]] = [[[] for _ in running] for _ in rig.memory.linear_slots]
    intervals: list[_Interval] = []
    for order in range(max(len(segment.marks) for segment in running) - 1):
        rows = tuple(row for row, segment in enumerate(running) if order + 1 < len(segment.marks))
        tile = [running[row] for row in rows]
        _run_interval(rig, tile, order, start)
        for layer, own in enumerate(log_decays):
            for row, segment in zip(rows, tile, strict=True):
                own[row] += segment.carries[layer].log_decays
        intervals.append(_collect(rows, tile))
        for segment in tile:
            segment.carries = [LinearCarry(carry.state, carry.tail) for carry in segment.carries]
    cumulative = tuple(_cumulative(own) for own in log_decays)
    planes = _compose(running, intervals, plan, cumulative)
    heads = _copy_heads(rig, running)
    return [
        CapturedSegment(segment.token_ids, segment.pages, heads[row], planes[row])
        for row, segment in enumerate(running)
    ]


def _begin(rig: Rig, token_ids: tuple[int, ...], prime: PrimeState | None, start: int, plan: CapturePlan) -> _Running:
    pages = rig.arena.take(len(token_ids))
    table = PageTable(PAGE_TOKENS)
    if prime is None:
        carries = [
            LinearCarry(torch.zeros_like(slots.states[0]), torch.zeros_like(slots.tails[0]))
            for slots in rig.memory.linear_slots
        ]
    else:
        # All segments of a pass begin at one position; a shorter prime is moved to stand right before it.
        shift = start - prime.num_tokens
        table.extend(PageRow(row.page, row.base + shift, row.first + shift, row.count) for row in prime.rows)
        carries = [LinearCarry(snapshot.state, snapshot.tail) for snapshot in prime.snapshots]
    table.extend(page_rows(pages, PAGE_TOKENS, start, start, len(token_ids)))
    first_slot = pages.start * PAGE_TOKENS
    slots = range(first_slot, first_slot + len(token_ids))
    return _Running(token_ids, pages, table, plan.marks(len(token_ids)), carries, slots)


def _run_interval(rig: Rig, tile: Sequence[_Running], order: int, start: int) -> None:
    spans = [(segment.marks[order], segment.marks[order + 1]) for segment in tile]
    pairs = list(zip(tile, spans, strict=True))
    places = [place for begin, end in spans for place in range(start + begin, start + end)]
    cu_runs = (0, *accumulate(end - begin for begin, end in spans))
    batch = CaptureBatch(
        walk=PartWalk(cu_runs, tuple(range(len(tile) + 1))),
        seam_tokens=tuple(0 for _ in tile),
        queries=PagedQueries(rig.integers(places), cu_runs, [segment.table for segment in tile]),
        base=start,
        write_slots=rig.integers([slot for own, (begin, end) in pairs for slot in own.write_slots[begin:end]]),
        carries=[segment.carries for segment in tile],
    )
    token_ids = [token for own, (begin, end) in pairs for token in own.token_ids[begin:end]]
    hidden = rig.model.embed(rig.integers(token_ids))
    for layer in rig.model.layers:
        hidden = layer.run(hidden, lambda mixer, normed: mixer.capture(normed, batch))


def _collect(rows: tuple[int, ...], tile: Sequence[_Running]) -> _Interval:
    """`S = h_end − T h_begin` of every segment's interval, layer by layer."""
    transitions, end_states, tails = [], [], []
    for carries in zip(*(segment.carries for segment in tile), strict=True):
        transition = torch.stack([carry.transition for carry in carries if carry.transition is not None])
        begin = torch.stack([carry.seam_state for carry in carries if carry.seam_state is not None])
        end = torch.stack([carry.state for carry in carries])
        transitions.append(transition)
        end_states.append(end - _apply(transition, begin))
        tails.append(torch.stack([carry.tail for carry in carries]))
    return _Interval(rows, tuple(transitions), tuple(end_states), tuple(tails))


def _copy_heads(rig: Rig, running: Sequence[_Running]) -> list[dict[int, int]]:
    """A page-table row shows a page from its first token on, so a body that begins inside a page gets a page of its own."""
    heads: list[dict[int, int]] = [{} for _ in running]
    sources: list[int] = []
    targets: list[int] = []
    for own, found in zip(running, heads, strict=True):
        for begin in own.marks[:-1]:
            if begin % PAGE_TOKENS:
                (found[begin],) = rig.arena.take(1)
                slots = own.write_slots[begin : page_end(begin)]
                sources.extend(slots)
                targets.extend(range(found[begin] * PAGE_TOKENS, found[begin] * PAGE_TOKENS + len(slots)))
    source, target = rig.integers(sources), rig.integers(targets)
    for pool in rig.memory.page_pools:
        for plane in (pool.keys, pool.values):
            moved = plane[source // PAGE_TOKENS, source % PAGE_TOKENS]
            plane[target // PAGE_TOKENS, target % PAGE_TOKENS] = moved
    return heads


def _compose(
    running: Sequence[_Running],
    intervals: Sequence[_Interval],
    plan: CapturePlan,
    log_decays: Sequence[torch.Tensor],
) -> list[dict[tuple[int, int], Planes]]:
    """Bodies from every mark to each wanted end; log_decays: cumulative, one a linear layer `[segments, L + 1, H]`."""
    planes: list[dict[tuple[int, int], Planes]] = [{} for _ in running]
    for tail in (0, *plan.tail_tokens):
        ends = [body_end(len(segment.token_ids), tail) for segment in running]
        counts = [own.marks.index(end) if end in own.marks else 0 for own, end in zip(running, ends, strict=True)]
        # Without linear layers a body has no planes, and is keys and values alone.
        found: dict[tuple[int, int], list[LinearPlane]] = {
            (row, order): [] for row, count in enumerate(counts) for order in range(count)
        }
        for layer in range(len(intervals[0].transitions)):
            for row, order, plane in _suffixes(intervals, counts, layer):
                own = log_decays[layer][row]
                decay = (own[ends[row]] - own[running[row].marks[order]]).exp()
                found[row, order].append(replace(plane, decay=decay))
        for (row, order), layers in found.items():
            planes[row][running[row].marks[order], ends[row]] = tuple(layers)
    return planes


def _suffixes(intervals: Sequence[_Interval], counts: Sequence[int], layer: int) -> list[tuple[int, int, LinearPlane]]:
    """For each segment row and each interval order: the plane from that interval's begin to the row's end."""
    composed: list[tuple[int, int, LinearPlane]] = []
    carried: dict[int, LinearPlane] = {}
    for order in reversed(range(len(intervals))):
        interval = intervals[order]
        picked = [index for index, row in enumerate(interval.rows) if order < counts[row]]
        if not picked:
            continue
        rows = [interval.rows[index] for index in picked]
        transition, end_state, tail = (
            stack[layer][picked] for stack in (interval.transitions, interval.end_states, interval.tails)
        )
        later = [index for index, row in enumerate(rows) if row in carried]
        if later:
            behind = torch.stack([carried[rows[index]].transition for index in later])
            written = torch.stack([carried[rows[index]].end_state for index in later])
            end_state[later] = _apply(behind, end_state[later]) + written
            transition[later] = _apply(behind, transition[later])
            tail[later] = torch.stack([carried[rows[index]].tail for index in later])
        # Of no body yet: the caller knows the decays.
        bound = transition.new_empty(0)
        for index, row in enumerate(rows):
            carried[row] = LinearPlane(transition[index], end_state[index], tail[index], bound)
            composed.append((row, order, carried[row]))
    return composed


def _apply(transition: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """`T S`; a transition of one number a head or channel, `[…, K or 1, 1]`, scales."""
    return transition @ state if transition.shape[-1] > 1 else transition * state


def _cumulative(log_decays: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Sums `[segments, longest + 1, H]` of the log decays of a segment's tokens before each place."""
    padded = pad_sequence([torch.cat(list(own)) for own in log_decays], batch_first=True)
    return torch.cat([torch.zeros_like(padded[:, :1]), padded.cumsum(1)], dim=1)
