"""The capture pass: segment states of several segments, each on its own after the profile's prime.

Nothing of a neighbour reaches a segment. On the CPU every segment also runs through matrix products of its own, whose
rounding then cannot depend on what it was packed with; a GPU runs the packed rows at once.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from services.worker.engine.combine import CombinePart, CombinePass, CombinePlan
from services.worker.engine.context import EngineContext
from services.worker.engine.pages import NoRoomError, pages_for
from services.worker.engine.states import PrefixState, SegmentState, page_rows
from services.worker.mixers.batch import CaptureBatch, LinearCarry
from services.worker.ops.layout import PartWalk
from services.worker.ops.paged_attention import PagedQueries, PageTable

__all__ = ["CapturePass", "capture_prime", "check_body", "pages_of"]


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


@dataclass(slots=True)
class _Segment:
    """One segment on its way: its pages, page table, carries, and the hidden states of the running chunk."""

    token_ids: tuple[int, ...]
    seam_window: int
    seam_pages: tuple[int, ...]
    body_pages: tuple[int, ...]
    table: PageTable
    write_slots: list[int]
    carries: list[LinearCarry]
    hidden: torch.Tensor | None = None


def pages_of(context: EngineContext, token_ids: tuple[int, ...]) -> int:
    """Pages that the capture of a segment holds while it runs: seam window and body start pages of their own."""
    size, seam = context.pages.page_size, context.profile.seam_window.tokens(len(token_ids))
    return pages_for(seam, size) + pages_for(len(token_ids) - seam, size)


class CapturePass:
    """Several segments on their way through the layers. Creating it reserves their pages.

    Raises:
        NoRoomError: pages are missing; nothing is taken.
        ValueError: a segment has no body under the profile's seam window.
    """

    def __init__(self, context: EngineContext, segments: Sequence[tuple[int, ...]], prime: PrefixState | None) -> None:
        self._context = context
        self._prime = prime
        self._start = 0 if prime is None else len(prime.token_ids)
        self._segments: list[_Segment] = []
        try:
            for token_ids in segments:
                self._segments.append(self._prepare(token_ids))
        except (NoRoomError, ValueError):
            self.abandon()
            raise

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(len(segment.token_ids) for segment in self._segments)

    @property
    def held_pages(self) -> tuple[int, ...]:
        """Pages that the unfinished pass holds."""
        return tuple(page for segment in self._segments for page in (*segment.seam_pages, *segment.body_pages))

    def run(self) -> Generator[None, None, list[SegmentState]]:
        """Yields after every layer of every chunk; returns the states, whose page references are the caller's."""
        chunk = self._context.profile.chunk_tokens
        longest = max(len(segment.token_ids) for segment in self._segments)
        for begin in range(0, longest, chunk):
            running = [segment for segment in self._segments if len(segment.token_ids) > begin]
            tiles = [[segment] for segment in running] if self._context.device.type == "cpu" else [running]
            batches = [(tile, self._batch(tile, begin)) for tile in tiles]
            for layer_index in range(len(self._context.model.layers)):
                for tile, batch in batches:
                    self._run_layer(layer_index, tile, batch)
                yield
        states = [self._finish(segment) for segment in self._segments]
        self._segments.clear()
        return states

    def abandon(self) -> None:
        """Give back every page of a pass that will not be finished."""
        for segment in self._segments:
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
        write_slots = [row.page * size + offset for row in rows for offset in range(row.count)]
        return _Segment(token_ids, seam, seam_pages, body_pages, table, write_slots, self._first_carries())

    def _first_carries(self) -> list[LinearCarry]:
        if self._prime is not None:
            return [LinearCarry(snapshot.state, snapshot.tail) for snapshot in self._prime.snapshots]
        return [
            LinearCarry(torch.zeros_like(slots.states[0]), torch.zeros_like(slots.tails[0]))
            for slots in self._context.memory.linear_slots
        ]

    def _batch(self, tile: Sequence[_Segment], begin: int) -> CaptureBatch:
        cu_runs = [0]
        seams: list[int] = []
        positions: list[int] = []
        write_slots: list[int] = []
        for segment in tile:
            end = min(begin + self._context.profile.chunk_tokens, len(segment.token_ids))
            token_ids = self._context.integers(segment.token_ids[begin:end])
            segment.hidden = self._context.model.embed(token_ids)
            cu_runs.append(cu_runs[-1] + end - begin)
            seams.append(min(max(segment.seam_window - begin, 0), end - begin))
            positions.extend(range(self._start + begin, self._start + end))
            write_slots.extend(segment.write_slots[begin:end])
        return CaptureBatch(
            walk=PartWalk(tuple(cu_runs), tuple(range(len(tile) + 1))),
            seam_tokens=tuple(seams),
            queries=PagedQueries(
                self._context.integers(positions), cu_runs, [segment.table for segment in tile], on_host=positions
            ),
            base=self._start,
            write_slots=self._context.integers(write_slots),
            carries=[segment.carries for segment in tile],
        )

    def _run_layer(self, layer_index: int, tile: Sequence[_Segment], batch: CaptureBatch) -> None:
        layer = self._context.model.layers[layer_index]
        hidden = torch.cat([segment.hidden for segment in tile if segment.hidden is not None])
        hidden = layer.run(hidden, lambda mixer, normed: mixer.capture(normed, batch))
        for run, segment in enumerate(tile):
            segment.hidden = hidden[batch.walk.run(run)]

    def _finish(self, segment: _Segment) -> SegmentState:
        self._context.pages.release(segment.seam_pages)
        body = self._start + segment.seam_window
        mixers = self._context.model.linear_mixers
        planes = tuple(mixer.finish(carry, body) for mixer, carry in zip(mixers, segment.carries, strict=True))
        return SegmentState(segment.token_ids, segment.seam_window, planes, segment.body_pages)
