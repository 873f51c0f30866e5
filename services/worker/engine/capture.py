"""The capture pass: segment states of several segments, each on its own after the profile's prime.

Nothing of a neighbour reaches a segment. On the CPU every segment also makes rows of its own, whose rounding then cannot
depend on what it was packed with; a GPU runs the packed rows at once.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace

from services.worker.engine.capture_rows import CapturedSegment, CaptureProgress, CaptureRows
from services.worker.engine.combine import CombinePass
from services.worker.engine.combine_plan import CombinePart, CombinePlan
from services.worker.engine.context import EngineContext
from services.worker.engine.pages import NoRoomError, pages_for
from services.worker.engine.requests import CaptureEvent
from services.worker.engine.states import PrefixState, SegmentState, page_rows
from services.worker.engine.sweep import Sweep
from services.worker.ops.paged_attention import PageTable

__all__ = [
    "CapturePass",
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


def pages_of(context: EngineContext, token_ids: tuple[int, ...]) -> int:
    """Pages that the capture of a segment holds while it runs: seam window and body start pages of their own."""
    size, seam = context.pages.page_size, context.profile.seam_window.tokens(len(token_ids))
    return pages_for(seam, size) + pages_for(len(token_ids) - seam, size)


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
        self._segments: list[CapturedSegment] = []
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

    def _prepare(self, token_ids: tuple[int, ...]) -> CapturedSegment:
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
        return CapturedSegment(token_ids, seam, seam_pages, body_pages, table, write_slots)
