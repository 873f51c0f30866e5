"""The capture pass: segment states of several segments, each on its own after the profile's prime.

Nothing of a neighbour reaches a segment. On the CPU every segment also makes rows of its own, whose rounding then cannot
depend on what it was packed with; a GPU runs the packed rows at once.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from services.worker.engine.combine import CombinePass
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import EngineContext
from services.worker.engine.pages import NoRoomError, pages_for
from services.worker.engine.requests import CaptureEvent
from services.worker.engine.states import PrefixState, SegmentState, page_rows
from services.worker.engine.sweep import ALL_LAYERS, Sweep
from services.worker.mixers.batch import CaptureBatch, LinearCarry, LinearPlane, Mixer
from services.worker.mixers.linear import LinearMixer
from services.worker.ops.layout import PartWalk
from services.worker.ops.paged_attention import PagedQueries, PageTable

__all__ = [
    "CapturePass",
    "CaptureProgress",
    "CaptureRows",
    "capture_prime",
    "check_body",
    "end_capture",
    "pages_of",
    "store_state",
]


def capture_prime(context: EngineContext) -> PrefixState | None:
    """The snapshot from which every segment starts; None for an empty prime. Its pages are the caller's.

    Raises:
        NoRoomError: the pools are too small for the prime.
    """
    prime_ids = context.profile.prime_ids
    if not prime_ids:
        return None
    running = CombinePass(context, CombinePlan(None, (CombinePart(prime_ids, keep=True),), max_tokens=0))
    for _ in running.run():
        pass
    running.prompt.release(context)
    return running.snapshots[0]


def check_body(context: EngineContext, token_ids: tuple[int, ...]) -> None:
    """Refuse a segment that the profile's seam window and the convolution leave no body.

    Raises:
        ValueError: the message names the window.
    """
    seam = context.profile.seam_window.tokens(len(token_ids))
    if len(token_ids) - seam < max(1, context.model.spec.conv_history):
        raise ValueError(f"a segment of {len(token_ids)} tokens has no body behind a seam window of {seam}")


def store_state(context: EngineContext, key: bytes, state: SegmentState) -> str:
    """Hand a captured state and its pages to the store. Returns why it is not stored; empty when it is, or was already."""
    if context.store.get_segment(key, state.token_ids) is not None:
        context.pages.release(state.pages)
        return ""
    try:
        context.store.put(key, state)
    except (NoRoomError, ValueError) as error:
        context.pages.release(state.pages)
        return str(error)
    return ""


def end_capture(context: EngineContext, key: bytes, seconds: float, reason: str = "") -> CaptureEvent:
    """What is said of a segment whose state is stored, or is not for a reason."""
    state = None if reason else context.store.get(key)
    size = 0 if state is None else context.store.size_bytes(state)
    return CaptureEvent(key, size, seconds, reason)


@dataclass(slots=True)
class _Segment:
    """One segment on its way: its pages, page table and carries, and the planes of the layers that are done with it.

    layers_done: layers that are done with all of its tokens; is_given_up: no more will be.
    """

    token_ids: tuple[int, ...]
    seam_window: int
    seam_pages: tuple[int, ...]
    body_pages: tuple[int, ...]
    table: PageTable
    write_slots: list[int]
    carries: list[LinearCarry] = field(default_factory=list)
    planes: list[LinearPlane] = field(default_factory=list)
    layers_done: int = 0
    is_given_up: bool = False

    @property
    def state(self) -> SegmentState:
        """What is there of it: grows with `planes`."""
        return SegmentState(self.token_ids, self.seam_window, self.planes, self.body_pages)


def pages_of(context: EngineContext, token_ids: tuple[int, ...]) -> int:
    """Pages that the capture of a segment holds while it runs: seam window and body start pages of their own."""
    size, seam = context.pages.page_size, context.profile.seam_window.tokens(len(token_ids))
    return pages_for(seam, size) + pages_for(len(token_ids) - seam, size)


class CaptureRows:
    """One chunk of several segments, packed. See `Rows`. tokens: which of every segment; prime: what they start from.

    Behind the mixer of a layer, the layer's planes of segments that end in this chunk are there for rows after these.
    """

    hidden: torch.Tensor
    _batch: CaptureBatch

    def __init__(
        self, context: EngineContext, segments: Sequence[_Segment], tokens: range, prime: PrefixState | None
    ) -> None:
        self._context = context
        self._segments = segments
        self._runs = [range(tokens.start, min(tokens.stop, len(segment.token_ids))) for segment in segments]
        self._prime = prime
        self._base = 0 if prime is None else len(prime.token_ids)

    @property
    def num_tokens(self) -> int:
        """See `Rows`."""
        return sum(len(run) for run in self._runs)

    @property
    def num_layers(self) -> int:
        """See `Rows`."""
        return ALL_LAYERS

    def start(self) -> None:
        """See `Rows`."""
        for segment, run in self._placed():
            if run.start == 0:
                segment.carries = self._first_carries()
        self._batch = self._create_batch()
        token_ids = [token for segment, run in self._placed() for token in segment.token_ids[run.start : run.stop]]
        self.hidden = self._context.model.embed(self._context.integers(token_ids))

    def mix(self, mixer: Mixer, normed: torch.Tensor) -> torch.Tensor:
        """See `Rows`; advances the segments' carries."""
        mixed = mixer.capture(normed, self._batch)
        ended = [segment for segment, run in self._placed() if run.stop == len(segment.token_ids)]
        if isinstance(mixer, LinearMixer):
            self._finish_layer(mixer, ended)
        for segment in ended:
            segment.layers_done += 1
        return mixed

    def _finish_layer(self, mixer: LinearMixer, ended: Sequence[_Segment]) -> None:
        """The planes of segments that end here, together."""
        if ended:
            carries = [segment.carries[mixer.slots.index] for segment in ended]
            planes = mixer.finish(carries, [self._base + segment.seam_window for segment in ended])
            for segment, plane in zip(ended, planes, strict=True):
                segment.planes.append(plane.stored_as(self._context.profile.encoding))

    def _placed(self) -> Iterator[tuple[_Segment, range]]:
        return zip(self._segments, self._runs, strict=True)

    def _first_carries(self) -> list[LinearCarry]:
        if self._prime is not None:
            return [LinearCarry(snapshot.state, snapshot.tail) for snapshot in self._prime.snapshots]
        return [
            LinearCarry(torch.zeros_like(slots.states[0]), torch.zeros_like(slots.tails[0]))
            for slots in self._context.memory.linear_slots
        ]

    def _create_batch(self) -> CaptureBatch:
        integers = self._context.integers
        cu_runs = (0, *accumulate(len(run) for run in self._runs))
        positions = [self._base + token for run in self._runs for token in run]
        write_slots = [slot for segment, run in self._placed() for slot in segment.write_slots[run.start : run.stop]]
        return CaptureBatch(
            walk=PartWalk(cu_runs, tuple(range(len(cu_runs)))),
            seam_tokens=tuple(
                min(max(segment.seam_window - run.start, 0), len(run)) for segment, run in self._placed()
            ),
            queries=PagedQueries(
                integers(positions), cu_runs, [segment.table for segment in self._segments], on_host=positions
            ),
            base=self._base,
            write_slots=integers(write_slots),
            carries=[segment.carries for segment in self._segments],
        )


class CaptureProgress:
    """A capture as others see it who want its state before it is whole. Ask on the engine's thread.

    state: of which `layers_done` layers may be read, while somebody holds on to its pages.
    """

    def __init__(self, segment: _Segment) -> None:
        self._segment = segment
        self.state = segment.state

    @property
    def layers_done(self) -> int:
        """Layers that will not change any more."""
        return self._segment.layers_done

    @property
    def is_given_up(self) -> bool:
        """No more layers will come."""
        return self._segment.is_given_up


class CapturePass:
    """Several segments on their way through the layers. Creating it reserves their pages.

    states: what is there of each; in its last chunk a layer's plane is there behind the layer's mixer.

    Raises:
        NoRoomError: pages are missing; nothing is taken.
        ValueError: a segment has no body under the profile's seam window.
    """

    def __init__(self, context: EngineContext, segments: Sequence[tuple[int, ...]], prime: PrefixState | None) -> None:
        self._context = context
        self._prime = prime
        self._start = 0 if prime is None else len(prime.token_ids)
        self._chunk = context.profile.chunk_tokens
        self._taken = 0
        self._segments: list[_Segment] = []
        try:
            for token_ids in segments:
                self._segments.append(self._prepare(token_ids))
        except (NoRoomError, ValueError):
            self.abandon()
            raise

    @property
    def states(self) -> list[SegmentState]:
        """See above; the pages are the pass's."""
        return [segment.state for segment in self._segments]

    def watch(self, index: int) -> CaptureProgress:
        """One of the segments on its way."""
        return CaptureProgress(self._segments[index])

    @property
    def held_pages(self) -> tuple[int, ...]:
        """Pages that the unfinished pass holds."""
        return tuple(page for segment in self._segments for page in (*segment.seam_pages, *segment.body_pages))

    @property
    def is_complete(self) -> bool:
        """Every chunk has been taken."""
        return all(len(segment.token_ids) <= self._taken for segment in self._segments)

    @property
    def chunks_left(self) -> int:
        """Sweeps until every chunk has been taken."""
        longest = max((len(segment.token_ids) for segment in self._segments), default=0)
        return max(0, -(-(longest - self._taken) // self._chunk))

    @property
    def next_tokens(self) -> int:
        """Tokens of the next chunk of every segment."""
        return sum(min(self._chunk, max(len(segment.token_ids) - self._taken, 0)) for segment in self._segments)

    def take_chunk(self) -> list[CaptureRows]:
        """The next chunk of every segment that has one, for one sweep."""
        running = [segment for segment in self._segments if len(segment.token_ids) > self._taken]
        packs = [[segment] for segment in running] if self._context.device.type == "cpu" else [running]
        tokens = range(self._taken, self._taken + self._chunk)
        self._taken = tokens.stop
        return [CaptureRows(self._context, pack, tokens, self._prime) for pack in packs]

    def finish(self) -> list[SegmentState]:
        """Behind the last chunk: the states, whose page references are the caller's."""
        states = [replace(state, planes=tuple(state.planes)) for state in self.states]
        for segment in self._segments:
            self._context.pages.release(segment.seam_pages)
        self._segments.clear()
        return states

    def run(self) -> Generator[None, None, list[SegmentState]]:
        """The segments alone: yields after every layer of every chunk; returns what `finish` does."""
        while not self.is_complete:
            yield from Sweep(self._context, self.take_chunk()).run()
        return self.finish()

    def abandon(self) -> None:
        """Give back every page of a pass that will not be finished."""
        for segment in self._segments:
            segment.is_given_up = True
            self._context.pages.release(segment.seam_pages)
            self._context.pages.release(segment.body_pages)
        self._segments.clear()

    def _prepare(self, token_ids: tuple[int, ...]) -> _Segment:
        context, size = self._context, self._context.pages.page_size
        check_body(context, token_ids)
        seam = context.profile.seam_window.tokens(len(token_ids))
        body = len(token_ids) - seam
        num_seam_pages = pages_for(seam, size)
        pages = context.pages.allocate(pages_of(context, token_ids))
        seam_pages, body_pages = pages[:num_seam_pages], pages[num_seam_pages:]
        table = PageTable(size)
        if self._prime is not None:
            table.extend(self._prime.rows)
        rows = page_rows(seam_pages, size, self._start, self._start, seam)
        rows += page_rows(body_pages, size, self._start, self._start + seam, body)
        table.extend(rows)
        write_slots = [slot for row in rows for slot in row.slots(size)]
        return _Segment(token_ids, seam, seam_pages, body_pages, table, write_slots)
